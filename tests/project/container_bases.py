"""Stand-ins for the images that the Dockerfile begins with, made of Debian's packages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

PYTHON = "python3,python3-venv,libpython3.11,ca-certificates,libgomp1,netbase"
# What the images static, base, cc and python3 are made of in distroless' own build files.
DISTROLESS = """
    base-files netbase tzdata media-types
    libc6 libssl3
    libgcc-s1 libgomp1 libstdc++6
    libbz2-1.0 libcom-err2 libcrypt1 libdb5.3 libexpat1 libffi8 libgssapi-krb5-2 libk5crypto3 libkeyutils1
    libkrb5-3 libkrb5support0 liblzma5 libncursesw6 libnsl2 libpython3.11-minimal libpython3.11-stdlib
    libreadline8 libsqlite3-0 libtinfo6 libtirpc3 libuuid1 python3-distutils python3.11-minimal zlib1g
"""
DISTROLESS_FILES = {
    "etc/passwd": """\
root:x:0:0:root:/root:/sbin/nologin
nobody:x:65534:65534:nobody:/nonexistent:/sbin/nologin
nonroot:x:65532:65532:nonroot:/home/nonroot:/sbin/nologin
""",
    "etc/group": "root:x:0:\nnobody:x:65534:\ntty:x:5:\nstaff:x:50:\nnonroot:x:65532:\n",
    "etc/nsswitch.conf": "hosts: files dns\n",
}
DISTROLESS_CONFIG = (
    "USER 65532",
    "WORKDIR /home/nonroot",
    'ENTRYPOINT ["/usr/bin/python3.11"]',
    "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt",
    "ENV LANG=C.UTF-8",
)

Run = Callable[..., str]


def make_python(root: Path, run: Run) -> None:
    """The official image's, as far as the Dockerfile goes: its Python is in /usr/local/bin."""
    bootstrap = ("debootstrap", "--variant=minbase", f"--include={PYTHON}", "bookworm")
    run(*bootstrap, str(root), timeout_s=900)
    (root / "usr/bin/python3").unlink()
    (root / "usr/local/bin/python3").symlink_to("/usr/bin/python3.11")


def make_distroless(root: Path, python: Path, run: Run) -> None:
    """Files of packages that were fetched for the other one, and no program but Python."""
    for package in DISTROLESS.split():
        (archive,) = (python / "var/cache/apt/archives").glob(f"{package}_*.deb")
        run("dpkg-deb", "--extract", str(archive), str(root))
    for path, text in DISTROLESS_FILES.items():
        (root / path).write_text(text)
    for name in ("python", "python3"):
        (root / "usr/bin" / name).symlink_to("python3.11")
    certificates = "etc/ssl/certs/ca-certificates.crt"
    (root / certificates).parent.mkdir(parents=True)
    shutil.copy(python / certificates, root / certificates)
    (root / "home/nonroot").mkdir(mode=0o700)
    os.chown(root / "home/nonroot", 65532, 65532)
