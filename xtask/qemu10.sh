#!/bin/sh
# Unpacks QEMU 10 of Debian's backports below DIRECTORY and prints a directory of programs to put before PATH. Its
# packages would replace the distribution's QEMU, so nothing is installed. Usage: xtask/qemu10.sh DIRECTORY
set -eu
mkdir -p "$1"
root=$(cd "$1" && pwd)
if [ ! -x "$root/bin/qemu-system-x86_64" ]; then
    . /etc/os-release
    # The mirror is the machine's own.
    mirror=$(apt-get indextargets --format '$(REPO_URI) $(CODENAME) $(ORIGIN) $(COMPONENT)' 'Created-By: Packages' |
        awk -v suite="$VERSION_CODENAME" '$2 == suite && $3 == "Debian" && $4 == "main" { print $1; exit }')
    [ -n "$mirror" ] || { echo "apt knows no mirror of Debian $VERSION_CODENAME: run apt-get update" >&2; exit 1; }
    keys=/usr/share/keyrings/debian-archive-keyring.gpg
    mkdir -p "$root/apt/lists/partial" "$root/apt/cache/archives/partial" "$root/files" "$root/bin"
    for suite in "" -updates -backports; do
        echo "deb $([ ! -e $keys ] || echo "[signed-by=$keys]") $mirror $VERSION_CODENAME$suite main"
    done >"$root/apt/sources.list"
    apt() {
        apt-get -qq -o Dir::Etc::SourceList="$root/apt/sources.list" -o Dir::Etc::SourceParts=- \
            -o Dir::State::Lists="$root/apt/lists" -o Dir::Cache="$root/apt/cache" "$@" >&2
    }
    apt update
    # What they need of the distribution is there: QEMU 7.2 needs it, too.
    apt install -y --no-install-recommends --reinstall --download-only -t "$VERSION_CODENAME-backports" \
        qemu-system-x86 qemu-utils qemu-block-extra
    for package in "$root"/apt/cache/archives/*.deb; do
        dpkg -x "$package" "$root/files"
    done
    libraries=$root/files/usr/lib/x86_64-linux-gnu
    for program in qemu-img qemu-io qemu-nbd qemu-system-x86_64; do
        firmware=
        [ $program != qemu-system-x86_64 ] || firmware="-L $root/files/usr/share/qemu -L $root/files/usr/share/seabios"
        printf '#!/bin/sh\nexport LD_LIBRARY_PATH=%s QEMU_MODULE_DIR=%s/qemu\nexec %s %s "$@"\n' \
            "$libraries" "$libraries" "$root/files/usr/bin/$program" "$firmware" >"$root/new"
        chmod +x "$root/new"
        mv "$root/new" "$root/bin/$program"
    done
fi
"$root/bin/qemu-system-x86_64" --version | head -1 >&2
echo "$root/bin"
