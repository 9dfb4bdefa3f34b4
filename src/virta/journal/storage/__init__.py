"""The journal on disk: records, snapshots, the table of leases, the directory."""
