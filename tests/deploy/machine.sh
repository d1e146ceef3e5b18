#!/usr/bin/env bash
# Boots systemd in namespaces of its own on a copy-on-write view of this machine's disk: machine.sh DIRECTORY NAME
# FILES. Run by machines.py under unshare. FILES is mounted at /mnt; nothing that is written reaches the real disk but
# DIRECTORY.
set -euo pipefail
base=$1 name=$2 files=$3
root=$base/$name/root
mkdir -p "$base/$name/upper" "$base/$name/work" "$root"
mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=/,upperdir=$base/$name/upper,workdir=$base/$name/work" "$root"
mount --bind "$files" "$root/mnt"
mount -t proc proc "$root/proc"
# Read-only, as in every container: this machine's kernel settings are not the guest's to change.
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,ro,bind "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom tty; do
  touch "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
for link in fd:fd stdin:fd/0 stdout:fd/1 stderr:fd/2; do ln -s "/proc/self/${link#*:}" "$root/dev/${link%%:*}"; done
for path in dev/shm run tmp; do mount -t tmpfs -o mode=1777 tmpfs "$root/$path"; done
chmod 755 "$root/run"
# systemd takes it from there.
echo "$name" >"$root/etc/hostname"
echo "127.0.1.1 $name" >>"$root/etc/hosts"
ip link set lo up
mkdir -p "$root/.old"
cd "$root"
pivot_root . .old
umount -l /.old
exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system --unit=basic.target
