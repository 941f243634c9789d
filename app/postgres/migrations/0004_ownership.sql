-- Who drives a stream (I6): take it, give it back, find those that nobody drives.

-- Whether the owner of a stream of this kind lives: it holds the lock on its own id, or its lease has not run out.
-- Asked under the stream's lock, or of a snapshot that is compared again when the stream is taken.
CREATE FUNCTION tga.is_living(owner uuid, owner_life text, lease_until timestamptz) RETURNS boolean
LANGUAGE sql VOLATILE SET search_path = pg_catalog, tga, pg_temp
AS $$
    SELECT CASE owner_life
           WHEN 'lease' THEN coalesce(lease_until > clock_timestamp(), false)
           -- Shared, and for this transaction only: two that look at one dead owner do not take each other for it.
           ELSE NOT pg_try_advisory_xact_lock_shared(executor_lock_key(owner)) END
$$;

-- Become the owner of a stream, unless a living executor owns it. A dead owner's stream is taken at once. Where owners
-- live by leases, taking a stream again renews its lease.
CREATE FUNCTION tga.acquire(lock_timeout_ms integer, stream_taken text, executor uuid)
RETURNS TABLE (taken boolean, owned_by uuid, taken_from uuid)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
DECLARE
    kind stream_kinds%ROWTYPE;
    head heads%ROWTYPE;
BEGIN
    PERFORM prepare_transaction(lock_timeout_ms);
    PERFORM pg_advisory_xact_lock(stream_lock_key(stream_taken));
    -- A later statement than the lock: in the same one it could read the state from before it.
    SELECT * INTO head FROM heads h WHERE h.stream = stream_taken;
    IF NOT FOUND THEN
        taken := own_unborn(stream_taken, executor);
        RETURN QUERY SELECT taken, CASE WHEN taken THEN executor END, NULL::uuid;
        RETURN;
    END IF;
    SELECT * INTO kind FROM stream_kinds k WHERE k.kind = split_part(stream_taken, ':', 1);
    IF head.owner <> executor AND is_living(head.owner, kind.owner_life, head.lease_until) THEN
        RETURN QUERY SELECT false, head.owner, NULL::uuid;
        RETURN;
    ELSIF head.owner IS DISTINCT FROM executor OR kind.owner_life = 'lease' THEN
        UPDATE heads h
           SET owner = executor, lease_until = clock_timestamp() + kind.lease_ms * interval '1 millisecond',
               updated_at = clock_timestamp()
         WHERE h.stream_no = head.stream_no;
    END IF;
    RETURN QUERY SELECT true, executor, nullif(head.owner, executor);
END
$$;

-- Give a stream back; a fenced executor has nothing to give back. A stream without entries leaves no trace.
CREATE FUNCTION tga.release(lock_timeout_ms integer, stream_released text, executor uuid) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
BEGIN
    PERFORM prepare_transaction(lock_timeout_ms);
    PERFORM pg_advisory_xact_lock(stream_lock_key(stream_released));
    DELETE FROM heads h WHERE h.stream = stream_released AND h.owner = executor AND h.sequence_number = 0;
    IF FOUND THEN
        RETURN true;
    END IF;
    UPDATE heads h SET owner = NULL, lease_until = NULL, updated_at = clock_timestamp()
     WHERE h.stream = stream_released AND h.owner = executor;
    RETURN FOUND;
END
$$;

-- Streams of a kind that nobody drives though they should be driven, oldest first: recovery's work. Those that
-- `asking` owns are among them: it knows which of them it drives, and which it has lost sight of.
CREATE FUNCTION tga.recoverable(of_kind text, asking uuid, after text, at_most integer) RETURNS SETOF text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    -- What has ended is no work any more, and will never be again; nothing is lost if this is.
    PERFORM set_config('synchronous_commit', 'off', true);
    DELETE FROM in_work w
     WHERE w.kind = of_kind AND w.stream_no = ANY (ARRAY(
           SELECT o.stream_no FROM in_work o JOIN heads h ON h.stream_no = o.stream_no
            WHERE o.kind = of_kind AND NOT h.is_open FOR UPDATE OF o SKIP LOCKED));

    -- One statement, one snapshot: a stream that is taken meanwhile is either seen with its new owner or not at all.
    -- Few executors own many streams, so each executor's lock is asked for once, and not each stream.
    RETURN QUERY
    WITH work AS MATERIALIZED (
        SELECT h.stream_no, h.stream, h.owner, h.lease_until, k.owner_life
          FROM stream_kinds k
          JOIN in_work w ON w.kind = k.kind
          JOIN heads h ON h.stream_no = w.stream_no
         WHERE k.kind = of_kind AND h.is_open AND h.waiting IS NULL
    ), living AS MATERIALIZED (
        SELECT o.owner FROM (SELECT DISTINCT w.owner FROM work w
                              WHERE w.owner IS DISTINCT FROM asking AND w.owner_life = 'session') AS o
         WHERE o.owner IS NOT NULL AND is_living(o.owner, 'session', NULL)
    )
    SELECT w.stream::text FROM work w
     WHERE CASE WHEN w.owner IS NULL OR w.owner = asking THEN true
                WHEN w.owner_life = 'lease' THEN NOT is_living(w.owner, 'lease', w.lease_until)
                ELSE w.owner NOT IN (SELECT l.owner FROM living l) END
       AND (after IS NULL OR w.stream_no > (SELECT h.stream_no FROM heads h WHERE h.stream = after))
     ORDER BY w.stream_no LIMIT at_most;
END
$$;

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA tga FROM PUBLIC;
GRANT EXECUTE ON FUNCTION
    tga.append, tga.stream_lock_key, tga.executor_lock_key, tga.acquire, tga.release, tga.recoverable TO tga_gateway;
