"""What a kit's run.sh does: see that the kit runs once and in one place, then become NVFlare's process."""

import fcntl
import json
import os
import sys
from pathlib import Path

from lrbpfl.disk import PRIVATE_FILE, write_file
from lrbpfl.errors import BadInput, plain

PLACE = "place"  # holds its own inode's number, which no copy of the file has


def claim(kit: Path) -> int:
    """Lock the kit until this process and what it becomes have ended: two of one name throw each other out for ever."""
    path = kit / PLACE
    handle = os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE_FILE)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInput(f"the kit {kit} runs already: it is one participant, and runs once") from None
        mine, told = str(os.fstat(handle).st_ino), os.read(handle, 64).decode(errors="replace").strip()
        if told and told != mine:
            raise BadInput(
                f"{kit} is a copy of a kit that was started elsewhere: every site has its own, from lrbpfl sites kit; "
                f"if the other one is gone for good, delete {path}"
            )
        if not told:
            os.write(handle, f"{mine}\n".encode())
            os.fsync(handle)
    except BaseException:
        os.close(handle)
        raise
    return handle


def settle(kit: Path) -> None:
    """Keep the server's jobs and snapshots in its kit, wherever that lies now, not in a directory for all."""
    file = kit / "local" / "resources.json"
    resources = json.loads(file.read_text())
    if "snapshot_persistor" not in resources:
        return  # a site's kit
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(kit / "snapshots")
    for component in resources["components"]:
        if component["id"] == "job_manager":
            component["args"]["uri_root"] = str(kit / "jobs")
    write_file(file, (json.dumps(resources, indent=2) + "\n").encode())


def main(kit: Path) -> None:
    """Does not come back: the process goes on as the kit's own script."""
    os.set_inheritable(claim(kit), True)
    settle(kit)
    # Texts of errors may hold data: with this switch they stay out of messages and logs.
    environment = {**os.environ, "NVFLARE_SECURE_LOGGING": "1"}
    environment.pop("NVFL_WORKSPACE", None)  # it would have the kit copied
    script = str(kit / "startup" / "sub_start.sh")
    os.execve("/usr/bin/env", ["env", "bash", script, "--once"], environment)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]).resolve())
    except BadInput as error:
        sys.exit(f"lrbpfl: {plain(error)}")
