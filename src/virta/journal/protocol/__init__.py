"""The journal's wire protocol: messages, their bytes, and commands built from them."""
