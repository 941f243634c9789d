-- Runs of a state in the very order of their lists, newest first: without the number at its end the index gave all runs
-- of the state to be sorted for each page.
DROP INDEX tga.runs_in_state;
CREATE INDEX runs_in_state ON tga.runs (tenant, state, created_at, stream_no);
