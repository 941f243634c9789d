-- Calls over MCP that came without an idempotency key, until their answer has arrived. Not part of the ledger: a row
-- says under which key a call was made, so that its re-issue is made under the same one, and goes when the answer was
-- delivered: the next call with the same arguments is another one then. docs/mcp.md says what is recognised, and why.

CREATE TABLE tga.mcp_intents (
    -- Of principal, tool and arguments (without secret ones, of which a digest could be guessed).
    fingerprint     bytea PRIMARY KEY CHECK (octet_length(fingerprint) = 32),
    server_id       text COLLATE "C" NOT NULL,
    tool_name       text COLLATE "C" NOT NULL,
    idempotency_key text COLLATE "C" NOT NULL CHECK (length(idempotency_key) <= 255),
    -- The executor whose client still waits for the answer; null when that connection is over.
    holder          uuid,
    touched_at      timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE INDEX mcp_intents_touched ON tga.mcp_intents (touched_at);

-- Begin, or join. `fresh`: a call that no client waits for, under the proposed key. `again`: the re-issue of one whose
-- answer did not arrive, under its key. `busy`: an equal call whose client still waits; ask again when that is settled.
--
-- `held_here`: keys of equal calls whose clients wait at the caller itself.
-- An answer that did not arrive is owed for `window_ms` after the connection broke; longer if the call is not over.
CREATE FUNCTION tga.mcp_begin(
    intent bytea, of_server text, of_tool text, proposed_key text, executor uuid, held_here text[],
    window_ms integer,
    OUT verdict text, OUT used_key text
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
DECLARE
    found_intent mcp_intents%ROWTYPE;
BEGIN
    -- No waiting for the disk: the commit that makes the call durable comes later, and brings this one with it.
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM set_config('lock_timeout', '5000', true);
    used_key := proposed_key;
    verdict := 'fresh';
    INSERT INTO mcp_intents (fingerprint, server_id, tool_name, idempotency_key, holder)
    VALUES (intent, of_server, of_tool, proposed_key, executor) ON CONFLICT (fingerprint) DO NOTHING;
    IF FOUND THEN
        RETURN;
    END IF;
    SELECT * INTO found_intent FROM mcp_intents i WHERE i.fingerprint = intent FOR UPDATE;
    IF NOT FOUND THEN
        verdict := 'busy';  -- settled just now: a client that asks again finds nothing
        RETURN;
    END IF;
    IF found_intent.idempotency_key = proposed_key THEN
        verdict := 'again';  -- who proposes the same key says itself that it is the same call
    ELSIF found_intent.holder = executor AND found_intent.idempotency_key = ANY (held_here)
        OR found_intent.holder <> executor
           AND NOT pg_try_advisory_xact_lock_shared(executor_lock_key(found_intent.holder))
    THEN
        verdict := 'busy';
        used_key := found_intent.idempotency_key;
        RETURN;
    ELSIF found_intent.touched_at > clock_timestamp() - window_ms * interval '1 millisecond'
        OR EXISTS (SELECT FROM heads h
                    WHERE h.subject = found_intent.server_id AND h.name = found_intent.tool_name
                      AND h.idempotency_key = found_intent.idempotency_key AND h.is_open)
    THEN
        verdict := 'again';
        used_key := found_intent.idempotency_key;
    END IF;
    UPDATE mcp_intents i SET idempotency_key = used_key, holder = executor, touched_at = clock_timestamp()
     WHERE i.fingerprint = intent;
END
$$;

-- The connection broke, or what was answered is not the end: the answer is still owed.
CREATE FUNCTION tga.mcp_leave(intent bytea, key text, executor uuid) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
    UPDATE mcp_intents i SET holder = NULL, touched_at = clock_timestamp()
     WHERE i.fingerprint = intent AND i.idempotency_key = key AND i.holder = executor
$$;

-- The answer arrived. Rows whose clients never came back go along, a few at a time.
CREATE FUNCTION tga.mcp_settle(intent bytea, key text) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
    -- Whichever connection holds it: of two connections with one key, one that got the answer is enough.
    DELETE FROM mcp_intents i WHERE i.fingerprint = intent AND i.idempotency_key = key;
    DELETE FROM mcp_intents i WHERE i.fingerprint IN (
        SELECT o.fingerprint FROM mcp_intents o
         WHERE o.touched_at < clock_timestamp() - interval '400 days'  -- longer than any request can wait for a person
         ORDER BY o.touched_at LIMIT 8 FOR UPDATE SKIP LOCKED)
$$;

GRANT SELECT ON tga.mcp_intents TO tga_gateway;
REVOKE ALL ON FUNCTION tga.mcp_begin, tga.mcp_leave, tga.mcp_settle FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tga.mcp_begin, tga.mcp_leave, tga.mcp_settle TO tga_gateway;
