"""Mixed load from 64 clients while the gateway is killed every few seconds: `python -m bench.load [--minutes 10]`.

Allowed calls, repeats, approvals, withdrawals, expiries, reused keys, bad bodies and reads over HTTP, against one
gateway process that gets SIGKILL (and now and then SIGTERM) and is started again; PostgreSQL and the tool server stay.
Afterwards the store, the tool server's own book and what every client was told are compared. Ends with 1 if one promise
was broken. `--quick`: some seconds, and two or three lives of the gateway.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from typing import Final

from bench.measure import arguments_of, own_folder
from tests.load.mixed import Scale, run_mixed_load

MINUTES: Final = 10.0
MINUTES_QUICK: Final = 0.1


def main() -> None:
    parser = arguments_of("load", __doc__)
    parser.add_argument("--minutes", type=float, help=f"how long (default {MINUTES:g})")
    parser.add_argument("--seed", type=int, help="of all that clients and killer choose (default: any)")
    given = parser.parse_args()
    minutes = given.minutes or (MINUTES_QUICK if given.quick else MINUTES)
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(2**32)
    scale = Scale(seconds=60 * minutes)
    if given.quick:
        scale = replace(scale, life_s=(1.0, 2.0), long_life_s=None)
    elif minutes >= 4:  # every second minute is one life, long enough for a leak to show
        scale = replace(scale, long_every_s=120, long_life_s=60)
    with own_folder("tga-load-") as home:
        verdict = run_mixed_load(home, scale, seed)
    print(verdict)
    sys.exit(1 if verdict.findings else 0)


if __name__ == "__main__":
    main()
