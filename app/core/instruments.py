"""Every metric of the gateway, in one table: docs/metrics.md is written from it.

Each part that counts is given an `Instruments`; gauges are read off when /metrics is asked (app/edge/metrics.py).
"""

from __future__ import annotations

from app.core.measuring import Counter, Gauge, Histogram, Metric, ReadCounter

_TOOL = ("server", "tool")
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Instruments:
    """Counters of one process. All of it stays small: labels that strangers choose are bounded."""

    def __init__(self) -> None:
        # Calls.
        self.calls = Counter(
            "tga_calls_total",
            "Calls that came to rest on this gateway: ended, or waiting for a person. `state` is the trace's;"
            " `decision` says who decided and what, or `none`.",
            (*_TOOL, "state", "decision"),
            open_labels=_TOOL,
        )
        self.phase_seconds = Histogram(
            "tga_call_phase_seconds",
            "How long each phase of a call took: `decide` (the policy), `intent` (commit before the send), `wait` (for"
            " a place at the server, or between attempts), `dispatch` (the tool itself), `effect` (commit of what came"
            " of it), `ask` (commit of a request that waits), and `total`.",
            ("server", "phase"),
            open_labels=("server",),
        )
        self.repeats = Counter(
            "tga_calls_repeated_total",
            "Calls that were answered from the record: repeats of calls with the same key.",
            ("server",),
            open_labels=("server",),
        )
        self.refusals = Counter(
            "tga_calls_refused_total", "Calls that were answered with an error, by its code.", ("code",)
        )
        self.retries = Counter(
            "tga_call_retries_total",
            "Sends after the first one of a call, by this gateway.",
            ("server",),
            open_labels=("server",),
        )
        self.unknown_outcomes = Counter(
            "tga_calls_unknown_total",
            "Calls that ended without anyone knowing whether the tool executed them.",
            ("server",),
            open_labels=("server",),
        )
        self.held = Counter(
            "tga_calls_held_total",
            "Calls that began to wait for an operator, because nobody knows what became of them.",
            ("server",),
            open_labels=("server",),
        )
        self.recoveries = Counter(
            "tga_recoveries_total",
            "Calls without a living executor that recovery looked at: `recovered`, or the code of what prevented it.",
            ("result",),
        )
        self.fences = Counter(
            "tga_fences_total",
            "Work that was refused because another had taken over: of a call (`trace`), of a worker (`run`).",
            ("kind",),
        )
        self.in_flight = Gauge("tga_requests_in_flight", "Requests that are being answered.")
        self.followers = Gauge(
            "tga_requests_following", "Streams of events that are open, and workers that wait for runs."
        )
        self.executing = Gauge(
            "tga_calls_executing",
            "Calls that are being executed, whether or not a caller waits.",
            ("server",),
            open_labels=("server",),
        )
        self.server_up = Gauge(
            "tga_server_up",
            "Whether the tool server can be called: 1, or 0.",
            ("server",),
            open_labels=("server",),
        )
        self.problems = Counter(
            "tga_problems_total", "Requests that were answered with a problem, by its code.", ("code",)
        )
        # What is asked of the store.
        self.commits = Counter(
            "tga_commits_total",
            "Plans that were committed: `stored`, `refused` by a rule of the store, or `failed` (no answer, or busy).",
            ("result",),
        )
        self.commit_seconds = Histogram("tga_commit_seconds", "How long a batch took to be committed.")
        self.batch_plans = Histogram("tga_commit_batch_plans", "How many plans were committed together.", bounds=_BATCH)
        self.queue_plans = Gauge("tga_commit_queue_plans", "Plans that wait to be committed.")
        self.queue_bytes = Gauge("tga_commit_queue_bytes", "Their size.")
        self.pool = Gauge(
            "tga_pool_sessions", "Sessions to PostgreSQL: `used`, `idle`, and `max` of them together.", ("state",)
        )
        self.pool_waiting = Gauge("tga_pool_waiting", "Who waits for a session.")
        # What stands in the store, whichever gateway put it there.
        self.store_up = Gauge("tga_store_up", "Whether the store answered when these numbers were read: 1, or 0.")
        self.approvals = Gauge(
            "tga_approvals_waiting",
            "What waits for a person's decision: `call`, or the question of a `run`.",
            ("kind",),
        )
        self.approvals_age = Gauge("tga_approvals_oldest_seconds", "How long the oldest of them has waited.", ("kind",))
        self.held_now = Gauge("tga_held_calls", "Calls that wait for an operator.")
        self.runs = Gauge(
            "tga_runs", "Runs that have not ended, and those that are FAILED, PARKED or DIVERGED.", ("state",)
        )
        self.runs_unworked = Gauge(
            "tga_runs_without_worker", "Runs that are ready, and whose program no living worker has."
        )
        self.workers = Gauge("tga_workers", "Workers that were heard of lately.")
        self.workers_waiting = Gauge("tga_workers_waiting", "Workers that wait for runs at this gateway.")
        self.webhook_backlog = Gauge("tga_webhook_backlog", "Announcements that no webhook has taken yet.")
        # Runs.
        self.run_changes = Counter("tga_run_changes_total", "Runs that came into a state on this gateway.", ("state",))
        self.leases = Counter(
            "tga_leases_total",
            "Attempts of workers that began (`leased`) and ended: `released`, `failed`, `lost`.",
            ("change",),
        )
        self.checkpoints = Counter(
            "tga_checkpoints_total", "Checkpoints that workers put, by where the value is.", ("tier",)
        )
        self.checkpoint_bytes = Counter("tga_checkpoint_bytes_total", "Bytes of their values.", ("tier",))
        self.escalations = Counter("tga_escalations_total", "Questions of runs that were told to others.")
        # The log.
        self.log_delay = Gauge(
            "tga_log_delay_seconds", "Age of the oldest entry that the sequencer has not put into the log."
        )
        self.log_size = Gauge("tga_log_size", "Leaves under the newest signed head.")
        self.log_leads = Gauge("tga_log_leading", "Whether this gateway is the one that sequences: 1, or 0.")
        self.log_condition = Gauge(
            "tga_log_condition",
            "1 at the condition of the log, as /readyz says it, or `forked`; 0 at the others.",
            ("state",),
        )
        self.log_faults = Counter(
            "tga_log_faults_total", "Times that sequencing or signing failed on this gateway, by code.", ("code",)
        )
        # Webhooks.
        self.deliveries = Counter(
            "tga_webhook_deliveries_total",
            "Tries to tell a webhook something: `taken`, or `failed`.",
            ("webhook", "result"),
        )
        # Telemetry itself.
        self.spans = Counter(
            "tga_spans_total",
            "Spans: `exported`, `dropped` because the collector does not keep up or is away, or `failed` to be taken.",
            ("result",),
        )
        self.lines_dropped = Counter("tga_log_lines_dropped_total", "Lines of calls that could not be written in time.")
        # The process.
        self.build = Gauge("tga_build_info", "1, with the gateway's version.", ("version",))
        self.clock_ahead = Gauge(
            "tga_clock_ahead_seconds", "How far this gateway's clock is ahead of the database's; below 0: behind it."
        )
        self.cpu_seconds = ReadCounter("process_cpu_seconds_total", "Processor time, of user and system.")
        self.resident_bytes = Gauge("process_resident_memory_bytes", "Resident memory.")
        self.open_files = Gauge("process_open_fds", "Open file descriptors.")
        self.files_max = Gauge("process_max_fds", "How many there may be.")
        self.tasks = Gauge("tga_event_loop_tasks", "Tasks of the event loop that have not ended.")
        self.started_at = Gauge("process_start_time_seconds", "When the process started, in seconds since 1970.")
        self.collections = ReadCounter(
            "python_gc_collections_total", "Times that Python's collector has run, by generation.", ("generation",)
        )

    def all(self) -> list[Metric]:
        return [metric for metric in vars(self).values() if isinstance(metric, Metric)]
