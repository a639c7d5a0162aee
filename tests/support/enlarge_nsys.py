"""Repeat the events of a real export later in time: python enlarge_nsys.py IN OUT MEGABYTES"""

import shutil
import sqlite3
import sys
from pathlib import Path

EVENTS = (
    "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET",
    "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS",
)  # fmt: skip


def enlarge(source: Path, target: Path, megabytes: float) -> None:
    """Double the events of a copy until the file is large enough."""
    shutil.copy(source, target)
    db = sqlite3.connect(target)
    db.execute("PRAGMA journal_mode = OFF")
    db.execute("PRAGMA synchronous = OFF")
    there = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    tables = [name for name in EVENTS if name in there]
    ends = [db.execute(f"SELECT max(end) FROM {name}").fetchone()[0] or 0 for name in tables]
    last = db.execute("SELECT max(correlationId) FROM CUPTI_ACTIVITY_KIND_RUNTIME").fetchone()[0]
    shift = {"start": max(ends) + 1000, "end": max(ends) + 1000, "correlationId": last + 1}
    while target.stat().st_size < megabytes * 1e6:
        for name in tables:
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({name})")]
            moved = [f"{one} + {shift[one]}" if one in shift else one for one in columns]
            where = "WHERE eventType IN (59, 60)" if name == "NVTX_EVENTS" else ""
            db.execute(f"INSERT INTO {name} SELECT {', '.join(moved)} FROM {name} {where}")
        db.commit()
        shift = {name: 2 * value for name, value in shift.items()}
    for name in tables:
        print(name, db.execute(f"SELECT count(*) FROM {name}").fetchone()[0])
    db.close()


if __name__ == "__main__":
    enlarge(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
    print(f"{Path(sys.argv[2]).stat().st_size / 1e6:.0f} MB")
