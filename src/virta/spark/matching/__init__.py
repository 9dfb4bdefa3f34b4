"""Filters over DataFrames: one filter as a Column, many through the matcher in Arrow batches."""
