"""Written by scripts/gen_protos.py from proto/pointsman/parsers/v1."""
