-- An entry that stands before the tree's cursor and has no leaf was put there behind the sequencer's back: `integrate`
-- looks only at what comes after the cursor. Who looks for such entries (`tga verify --all`, and the sequencer, bit by
-- bit) compares them with this: the cursor, and the first transaction number that was not given yet.
--
-- No row while the numbers cannot be compared: after dump and restore those of two clusters stand side by side until the
-- sequencer has walked through all of them. Where a provider hides which cluster it is, a number from ahead may be an
-- honest one from a former life: `is_cluster_known` is false.
CREATE VIEW tga.tree_place AS
SELECT c.xid, c.stream, c.sequence_number, n.next_xid, n.here <> 'hidden' AS is_cluster_known
  FROM tga.tree_cursor c
 CROSS JOIN (SELECT pg_snapshot_xmax(pg_current_snapshot()) AS next_xid, tga.cluster_identifier() AS here) AS n
 WHERE c.system_identifier = n.here AND NOT c.is_walking AND c.xid < n.next_xid;

-- Asked by the gateway's role, answered as by the sequencer's function: both must mean the same cluster.
ALTER FUNCTION tga.cluster_identifier() SECURITY DEFINER;
GRANT EXECUTE ON FUNCTION tga.cluster_identifier TO tga_gateway;
GRANT SELECT ON tga.tree_place TO tga_gateway;
