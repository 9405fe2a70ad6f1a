"""The commands of the `kairox` program, thin over the Python API."""
