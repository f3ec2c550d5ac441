"""The record on disk, and the views that are made from it alone. Imports no torch."""
