"""The system stream: what the gateway itself does and relies on, on the record."""
