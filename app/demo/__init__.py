"""What a user can try the gateway with: a tool server that honours idempotency keys, and its configuration."""
