"""The Python SDK of TGA Gateway. So far its journal alone; it never imports `app`."""
