-- Indexes for pages that people read: API keys of a tenant, and what waits for a person by when it expires. None is on
-- a table that an ordinary call writes: a call that waits for nobody has no row in `at_rest`.
CREATE INDEX api_keys_listed ON tga.api_keys (tenant, created_at, key_id);
-- What never expires comes last.
CREATE INDEX at_rest_by_expiry
    ON tga.at_rest (tenant, waiting, (coalesce(expires_at, 'infinity'::timestamptz)), stream_no)
    WHERE waiting IS NOT NULL;
CREATE INDEX run_requests_by_expiry
    ON tga.run_requests (tenant, (coalesce(expires_at, 'infinity'::timestamptz)), stream_no, path);
