"""The engine of runs: every way in which a run goes on is a decision on its folded journal, and one commit."""
