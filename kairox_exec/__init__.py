"""The same decisions on real devices. Torch lives only here."""
