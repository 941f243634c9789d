"""Code as users of the SDK write it. `make check` reads it with mypy and pyright, both strict; nothing here is run."""
