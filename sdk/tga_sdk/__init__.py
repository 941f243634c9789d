"""The Python SDK of TGA Gateway. Empty until durable procedures arrive; it never imports `app`."""
