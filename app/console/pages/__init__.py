"""One module a page: what it asks of the API, and what its template gets."""
