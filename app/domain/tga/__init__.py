"""One governed tool call: its documents, its Moore machine, its log."""
