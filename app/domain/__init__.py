"""The rules; they talk to the world only through the ports they declare."""
