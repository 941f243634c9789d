-- Calls of an agent and calls of a tool, in the order of their ids: a page of those that seldom come is one look, too.
-- Every call pays for these, so they hold no names: a hash of whose they are, and of the id its time to a quarter of a
-- second. Lists compare the names themselves, and sort what fell into the same quarter.
-- docs/adr/0058-calls-of-an-agent-or-a-tool.md has the figures.
CREATE INDEX heads_of_principal
    ON tga.heads (hashtext(tenant || ' ' || principal_id), substr(stream, 7, 11))
    WHERE stream >= 'trace:' AND stream < 'trace;';
CREATE INDEX heads_of_tool
    ON tga.heads (hashtext(tenant || ' ' || subject || ' ' || name), substr(stream, 7, 11))
    WHERE stream >= 'trace:' AND stream < 'trace;';
