"""The console: routes and pages on the gateway's own API. Nothing is decided, stored or verified here."""
