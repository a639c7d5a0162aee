"""Keep what the reader uses of a real export: python trim_nsys.py IN OUT.sqlite.xz

The tables stay as nsys wrote them; strings that nothing refers to and facts about the machine go.
"""

import lzma
import sqlite3
import sys
import tempfile
from pathlib import Path

KEPT = (
    "StringIds", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_MEMSET", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "DIAGNOSTIC_EVENT",
    "TARGET_INFO_GPU", "META_DATA_EXPORT", "CUDA_GPU_MEMORY_USAGE_EVENTS",
)  # fmt: skip
STRINGS = {
    "CUPTI_ACTIVITY_KIND_KERNEL": ("demangledName", "shortName", "mangledName"),
    "CUPTI_ACTIVITY_KIND_RUNTIME": ("nameId",),
    "NVTX_EVENTS": ("textId",),
}


def trim(source: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.sqlite"
        copy.write_bytes(source.read_bytes())
        db = sqlite3.connect(copy)
        tables = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for (name,) in tables:
            if name not in KEPT:
                db.execute(f"DROP TABLE {name}")
        used = [f"SELECT {one} FROM {table}" for table, ones in STRINGS.items() for one in ones]
        wanted = " UNION ".join(f"{query} WHERE {query.split()[1]} NOT NULL" for query in used)
        db.execute(f"DELETE FROM StringIds WHERE id NOT IN ({wanted})")
        if ("CUDA_GPU_MEMORY_USAGE_EVENTS",) in tables:
            db.execute("DELETE FROM CUDA_GPU_MEMORY_USAGE_EVENTS WHERE memKind = 5")  # 810 rows
        db.execute("UPDATE TARGET_INFO_GPU SET uuid = '', busLocation = ''")
        db.execute("DELETE FROM DIAGNOSTIC_EVENT WHERE text LIKE '%/tmp/%'")
        db.commit()
        db.execute("VACUUM")
        db.close()
        target.write_bytes(lzma.compress(copy.read_bytes(), preset=9))


if __name__ == "__main__":
    trim(Path(sys.argv[1]), Path(sys.argv[2]))
