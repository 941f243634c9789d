-- Announcements that are still to be made to webhooks. Not part of the ledger: rows come in the transaction in which a
-- stream starts to wait for someone, and go when they were delivered or when nobody needs to be told any more.

CREATE TABLE tga.outbox (
    id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    webhook         text NOT NULL,
    stream          text NOT NULL,
    waiting         text,  -- for whom the stream waited when this was to be told
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    attempts        integer NOT NULL DEFAULT 0,
    next_attempt_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_error      text
) WITH (fillfactor = 70);

CREATE INDEX outbox_due ON tga.outbox (webhook, next_attempt_at, id);
CREATE INDEX outbox_stream ON tga.outbox (stream);

-- Due rows of these webhooks, oldest first, leased to the caller: until the lease has run out nobody else gets them.
-- `attempts` is the fence: it tells this taker from the next.
CREATE FUNCTION tga.outbox_take(webhooks text[], lease_ms integer, at_most integer)
RETURNS TABLE (id bigint, webhook text, stream text, attempts integer, created_at timestamptz)
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
    -- Materialized: in a join the rows could be looked for, and locked, more than once.
    WITH due AS MATERIALIZED (
        SELECT o.id FROM outbox o
         WHERE o.webhook = ANY (webhooks) AND o.next_attempt_at <= statement_timestamp()
         ORDER BY o.next_attempt_at, o.id LIMIT at_most
           FOR UPDATE SKIP LOCKED
    )
    UPDATE outbox o
       SET attempts = o.attempts + 1,
           next_attempt_at = clock_timestamp() + greatest(lease_ms, 1) * interval '1 millisecond'
      FROM due WHERE o.id = due.id
    RETURNING o.id, o.webhook, o.stream, o.attempts, o.created_at
$$;

-- Delivered, or no longer wanted. Whoever says so last finds nothing to do.
CREATE FUNCTION tga.outbox_done(ids bigint[]) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
    DELETE FROM outbox o WHERE o.id = ANY (ids)
$$;

-- Not delivered; due again after `retry_ms`. False, and nothing is changed, when another has taken the row meanwhile:
-- a late word must not cut the lease of the one who is delivering now.
CREATE FUNCTION tga.outbox_failed(row_id bigint, attempt integer, error text, retry_ms integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
BEGIN
    UPDATE outbox o
       SET last_error = left(error, 1024),
           next_attempt_at = clock_timestamp() + greatest(retry_ms, 1) * interval '1 millisecond'
     WHERE o.id = row_id AND o.attempts = attempt;
    RETURN FOUND;
END
$$;

-- Rows of any webhook, configured or not, whose stream no longer waits for whom it waited. Returns how many there were.
CREATE FUNCTION tga.outbox_drop_decided(at_most integer) RETURNS bigint
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
    WITH decided AS MATERIALIZED (
        SELECT o.id FROM outbox o
         WHERE NOT EXISTS (SELECT FROM heads h WHERE h.stream = o.stream AND h.waiting = o.waiting)
         ORDER BY o.id LIMIT at_most
           FOR UPDATE SKIP LOCKED
    ), dropped AS (
        DELETE FROM outbox o USING decided WHERE o.id = decided.id RETURNING 1
    )
    SELECT count(*) FROM dropped
$$;

GRANT SELECT ON tga.outbox TO tga_gateway;
REVOKE ALL ON FUNCTION tga.outbox_take, tga.outbox_done, tga.outbox_failed, tga.outbox_drop_decided FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tga.outbox_take, tga.outbox_done, tga.outbox_failed, tga.outbox_drop_decided TO tga_gateway;
