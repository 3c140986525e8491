#!/usr/bin/env bash
# rxe_vm.sh - run a command inside a throw-away VM that has real RDMA verbs (Soft-RoCE, rdma_rxe).
#
#   rxe_vm.sh [options] [--] command [args...]
#
# The guest boots Debian's stock kernel (linux-image-amd64, never installed on the host, only unpacked),
# its root is the HOST's own root file system (virtiofs or 9p, read-only, with a tmpfs overlay on top), so every
# interpreter, venv, library and tool of the host is there at the same path.  Folders given with
# -w/--rw (default: the current folder) are mounted read-write at the same path.
# The command's stdout and stderr come back separately; its exit status is this script's exit status.
#
# In the guest:  rxe0 on veth0 (10.77.0.1)  <-- real packets -->  rxe1 on veth1 (10.77.0.2),
# RoCEv2/IPv4 GID index in $RXE_GID_INDEX (1).  $RXE_DEVS="rxe0 rxe1", $RXE_IPS="10.77.0.1 10.77.0.2".
#
# With --nodes N (default 1) N VMs are booted, joined by a private L2 segment (qemu sockets on 127.0.0.1); the command
# runs in every one with NODE_RANK=0..N-1, NODE_COUNT=N; beside the two above, node r has rxe2 on eth0 = 10.78.0.(r+1).
# Exit status is the highest one; with --leader it is node 0's, and the other VMs end when node 0's command does.
#
# Options
#   -w, --rw DIR      mount DIR read-write at the same path (repeatable; default $PWD)
#   -m, --mem MB      guest memory (default 2048)
#   -c, --cpus N      guest cpus (default 2)
#   -t, --timeout S   kill the VM after S seconds (default 600); exit status 124
#   -n, --nodes N     boot N VMs
#       --leader      node 0 decides: its exit status, its output as it is
#       --fs KIND     virtiofs | 9p   (default virtiofs when /usr/lib/qemu/virtiofsd is there)
#       --accel A     tcg | kvm (default: tcg; kvm only if RXE_VM_ACCEL=kvm or --accel kvm)
#       --klog FILE   keep the guest's kernel log (default: thrown away; shown when the guest fails to boot)
#       --prepare     only fetch the kernel and build the initramfs
#       --pyverbs PY  the command runs this Python, which must be able to load pyverbs
#   Environment: RXE_VM_CACHE (default ~/.cache/rxe_vm): kernel and initramfs.
#
# Exit status 3: QEMU, another tool, pyverbs or the kernel cannot be had; all that is missing is named at once, and the
# last line installs it.
# Needs (apt): python3 qemu-system-x86 busybox-static kmod cpio iproute2 ibverbs-providers
set -euo pipefail
INSTALL="apt-get update && apt-get install --no-install-recommends \
python3 qemu-system-x86 busybox-static kmod cpio iproute2 ibverbs-providers"

CACHE=${RXE_VM_CACHE:-$HOME/.cache/rxe_vm}
MEM=2048 CPUS=2 TMO=600 NODES=1 ACCEL=${RXE_VM_ACCEL:-tcg} KLOG= PREPARE=0 FS= LEADER=0 PYVERBS=
RW=()
while [ $# -gt 0 ]; do
  case $1 in
    -w|--rw) RW+=("$(realpath "$2")"); shift 2;;
    -m|--mem) MEM=$2; shift 2;;
    -c|--cpus) CPUS=$2; shift 2;;
    -t|--timeout) TMO=$2; shift 2;;
    -n|--nodes) NODES=$2; shift 2;;
    --leader) LEADER=1; shift;;
    --fs) FS=$2; shift 2;;
    --accel) ACCEL=$2; shift 2;;
    --klog) KLOG=$2; shift 2;;
    --prepare) PREPARE=1; shift;;
    --pyverbs) PYVERBS=$2; shift 2;;
    --) shift; break;;
    -h|--help) sed -n '2,39p' "$0"; exit 0;;
    -*) echo "rxe_vm: unknown option $1" >&2; exit 2;;
    *) break;;
  esac
done
[ $PREPARE = 1 ] || [ $# -gt 0 ] || { echo "rxe_vm: no command" >&2; exit 2; }
[ ${#RW[@]} -gt 0 ] || RW=("$PWD")
missing=
for tool in python3 qemu-system-x86_64 busybox cpio ip rdma /sbin/modprobe /sbin/depmod dpkg apt-get apt-cache; do
  command -v $tool >/dev/null || missing="$missing $tool"
done
if [ -n "$PYVERBS" ]; then
  INSTALL="$INSTALL python3-pyverbs"
  why=$("$PYVERBS" -c '
import sys
from kvbm.core.errors import VerbsError
from kvbm.verbs.library import load_pyverbs
try:
    load_pyverbs()
except VerbsError as error:
    sys.exit(str(error))' 2>&1) || { printf 'rxe_vm: %s\n' "$why" >&2; missing="$missing pyverbs"; }
fi
KERNEL_PKG=${RXE_VM_KERNEL_PKG:-}
if [ -z "$KERNEL_PKG" ] && command -v apt-cache >/dev/null; then
  KERNEL_PKG=$(apt-cache depends linux-image-amd64 2>/dev/null |
    awk '/Depends: linux-image-[0-9]/{print $2; exit}') || true
  [ -n "$KERNEL_PKG" ] || missing="$missing linux-image-amd64 (of apt's lists)"
fi
if [ -n "$missing" ]; then printf 'rxe_vm: not here:%s; install with\n%s\n' "$missing" "$INSTALL" >&2; exit 3; fi
VIRTIOFSD=${VIRTIOFSD:-}
for f in /usr/lib/qemu/virtiofsd /usr/libexec/virtiofsd; do [ -z "$VIRTIOFSD" ] && [ -x $f ] && VIRTIOFSD=$f; done
[ -n "$FS" ] || { [ -n "$VIRTIOFSD" ] && FS=virtiofs || FS=9p; }

# ---------------------------------------------------------------- kernel + initramfs (cached)
MODS="crc32_generic virtio_pci virtio_console virtio_rng 9pnet_virtio 9p virtiofs overlay dummy veth sch_netem \
virtio_net ib_uverbs rdma_ucm ib_umad rdma_rxe"
prepare() {
  mkdir -p "$CACHE"
  local pkg=$KERNEL_PKG
  local kv=${pkg#linux-image-}
  KERNEL=$CACHE/$kv/vmlinux INITRD=$CACHE/$kv/initrd-v7.cpio
  exec 9> "$CACHE/lock"; flock 9  # another run may prepare the same
  if [ ! -s "$KERNEL" ]; then
    local tmp; tmp=$(mktemp -d "$CACHE/dl.XXXXXX")
    get() { (cd "$tmp" && apt-get -q -o APT::Sandbox::User=root download "$pkg" >&2 && dpkg -x ./*.deb x); }
    if ! get && ! { apt-get -q update >&2 && get; }; then  # lists that are old name a version that has gone
      rm -rf "$tmp"; printf 'rxe_vm: the kernel %s cannot be downloaded; try\n%s\n' "$pkg" "$INSTALL" >&2; exit 3
    fi
    /sbin/depmod -b "$tmp/x" "$kv"
    # the plain ELF boots through PVH: saves 3 s of xz under TCG
    python3 -c '
import lzma, sys
d = open(sys.argv[1], "rb").read()
xz = d[d.find(b"\xfd7zXZ\x00"):]
open(sys.argv[2], "wb").write(lzma.LZMADecompressor().decompress(xz))' "$tmp/x/boot/vmlinuz-$kv" "$tmp/x/vmlinux"
    rm -rf "${CACHE:?}/$kv"; mv "$tmp/x" "$CACHE/$kv"; rm -rf "$tmp"
  fi
  if [ ! -s "$INITRD" ]; then
    local r; r=$(mktemp -d "$CACHE/ir.XXXXXX")
    mkdir -p "$r"/{bin,dev,proc,sys,mod,host,rw,new}
    cp "$(command -v busybox)" "$r/bin/"
    local m f n=0
    for m in $MODS; do
      /sbin/modprobe -d "$CACHE/$kv" -S "$kv" --show-depends $m
    done | awk '$1=="insmod"{print $2}' | awk '!s[$0]++' | while read -r f; do
      n=$((n+1)); cp "$f" "$r/mod/$(printf %03d $n)-$(basename "$f")"
    done
    cat > "$r/init" <<'INIT'
#!/bin/busybox sh
B=/bin/busybox
$B mount -t devtmpfs dev /dev; $B mount -t proc proc /proc; $B mount -t sysfs sys /sys
die() { echo "rxe_vm init: $*" > /dev/console; $B poweroff -f; }
for m in /mod/*.ko; do $B insmod $m || echo "insmod $m failed" > /dev/console; done
opt() { for a in $($B cat /proc/cmdline); do case $a in $1=*) echo ${a#$1=};; esac; done; }
FS=$(opt rxe.fs)
m() { # tag target ro|rw
  if [ $FS = virtiofs ]; then $B mount -t virtiofs -o $3 $1 $2
  else
    kept=$([ $3 = ro ] && echo loose || echo mmap)
    $B mount -t 9p -o $3,trans=virtio,version=9p2000.L,msize=524288,cache=$kept $1 $2
  fi
}
m root /host ro || die "cannot mount the host root"
$B mount -t tmpfs -o size=75% tmpfs /rw
$B mkdir -p /rw/up /rw/wk
$B mount -t overlay -o lowerdir=/host,upperdir=/rw/up,workdir=/rw/wk overlay /new || die "overlay"
$B mount --move /dev /new/dev; $B mount --move /proc /new/proc; $B mount --move /sys /new/sys
$B mkdir -p /new/dev/shm /new/dev/pts; $B mount -t tmpfs shm /new/dev/shm; $B mount -t devpts pts /new/dev/pts
$B mount -t tmpfs run /new/run
m ctl /new/run ro || die "cannot mount ctl"
i=0
while read -r d; do
  $B mkdir -p "/new$d"; m rw$i "/new$d" rw || die "cannot mount $d"; i=$((i+1))
done < /new/run/rwdirs
exec $B switch_root /new /bin/bash /run/guest.sh
INIT
    chmod +x "$r/init"
    (cd "$r" && find . | cpio -o -H newc --quiet) > "$INITRD.tmp" && mv "$INITRD.tmp" "$INITRD"
    rm -rf "$r"
  fi
  exec 9>&-
}
prepare
[ $PREPARE = 1 ] && { echo "$KERNEL"; echo "$INITRD"; exit 0; }

# ---------------------------------------------------------------- run
RUN=$(mktemp -d -t rxe_vm.XXXXXX)
PIDS=()
cleanup() {
  local p
  for p in "${PIDS[@]:-}" "${CATS[@]:-}"; do [ -n "$p" ] && kill "$p" 2>/dev/null || true; done
  rm -rf "$RUN"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

CTL=$RUN/ctl; mkdir "$CTL"
printf '%s\n' "${RW[@]}" > "$CTL/rwdirs"
{ printf 'cd %q\n' "$PWD"; printf 'exec'; printf ' %q' "$@"; echo; } > "$CTL/cmd"
export -p | grep -v -E '^declare -x (TMPDIR|SHLVL|PWD|OLDPWD|_|NODE_RANK|NODE_COUNT)=' > "$CTL/env" || true
cat > "$CTL/guest.sh" <<'GUEST'
for p in /sys/class/virtio-ports/*; do read -r n < $p/name; case $n in rxe.*) ln -s /dev/${p##*/} /dev/$n;; esac; done
exec > /dev/rxe.out 2> /dev/rxe.err < /dev/null
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
opt() { for a in $(cat /proc/cmdline); do case $a in $1=*) echo ${a#$1=};; esac; done; }
. /run/env 2>/dev/null
export NODE_RANK=$(opt rxe.rank) NODE_COUNT=$(opt rxe.nodes)
hostname node$NODE_RANK
ip link set lo up
ulimit -l unlimited
ip link add veth0 mtu 4200 type veth peer name veth1 mtu 4200
for i in 0 1; do
  echo 0 > /proc/sys/net/ipv4/conf/veth$i/rp_filter; echo 1 > /proc/sys/net/ipv4/conf/veth$i/accept_local
  ip addr add 10.77.0.$((i+1))/24 dev veth$i; ip link set veth$i up
done
echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter
# both ends are in one namespace (rxe of this kernel only listens in init_net): force the packets through the veth pair
ip rule add pref 1 iif veth0 lookup local; ip rule add pref 2 iif veth1 lookup local
ip rule add pref 10 from 10.77.0.1 to 10.77.0.2 lookup 100; ip rule add pref 11 from 10.77.0.2 to 10.77.0.1 lookup 101
ip route add 10.77.0.2/32 dev veth0 src 10.77.0.1 table 100; ip route add 10.77.0.1/32 dev veth1 src 10.77.0.2 table 101
ip rule add pref 100 lookup local; ip rule del pref 0
for i in 0 1; do rdma link add rxe$i type rxe netdev veth$i || echo "rxe_vm: rxe$i failed" >&2; done
export RXE_DEVS="rxe0 rxe1" RXE_IPS="10.77.0.1 10.77.0.2"
if [ $NODE_COUNT -gt 1 ]; then
  ip link set eth0 mtu 4200 2>/dev/null; ip addr add 10.78.0.$((NODE_RANK+1))/24 dev eth0; ip link set eth0 up
  rdma link add rxe2 type rxe netdev eth0 || echo "rxe_vm: rxe2 failed" >&2
  export RXE_DEVS="rxe0 rxe1 rxe2" RXE_IPS="10.77.0.1 10.77.0.2 10.78.0.$((NODE_RANK+1))" RXE_IP_BASE=10.78.0.
fi
# udev is not running: make the device nodes
for d in /sys/class/infiniband_verbs/uverbs* /sys/class/infiniband_mad/umad* ; do
  [ -e $d/dev ] && mkdir -p /dev/infiniband && [ ! -e /dev/infiniband/${d##*/} ] &&
    mknod /dev/infiniband/${d##*/} c $(tr : ' ' < $d/dev)
done
chmod 666 /dev/infiniband/* 2>/dev/null
for k in $(seq 40); do
  [ $(grep -ls ':ffff:' /sys/class/infiniband/rxe*/ports/1/gids/1 | wc -l) = $(echo $RXE_DEVS | wc -w) ] && break
  sleep 0.05
done
export RXE_GID_INDEX=1
read -r up _ < /proc/uptime; export RXE_VM_BOOT_S=$up
( . /run/cmd )
rc=$?
exec 1>&- 2>&-
sync
echo $rc > /dev/rxe.rc
echo b > /proc/sysrq-trigger; sleep 5      # "reboot" ends qemu (-no-reboot)
GUEST

case $ACCEL in
  tcg) ACC=(-accel tcg,thread=multi,tb-size=256 -cpu max,la57=off);;
  kvm) ACC=(-accel kvm -cpu host,-arch-capabilities);;
esac

share() { # node tag path ro|rw  -> adds to Q
  local node=$1 tag=$2 path=$3 mode=$4 ro=
  [ $mode = rw ] || ro=,readonly=on
  if [ $FS = virtiofs ]; then
    local sock=$RUN/$node-$tag.sock
    "$VIRTIOFSD" --socket-path="$sock" -o source="$path" -o sandbox=chroot \
        -o cache=$([ $mode = ro ] && echo always || echo auto) \
        -o log_level=err --thread-pool-size=0 >"$RUN/$node-$tag.log" 2>&1 &
    PIDS+=($!)
    local k; for k in $(seq 100); do [ -S "$sock" ] && break; sleep 0.02; done
    Q+=(-chardev socket,id=c-$tag,path="$sock" -device vhost-user-fs-pci,queue-size=1024,chardev=c-$tag,tag=$tag)
  else
    Q+=(-fsdev local,id=f-$tag,path="$path",security_model=none,multidevs=remap$ro
        -device virtio-9p-pci,fsdev=f-$tag,mount_tag=$tag)
  fi
}

QPIDS=() CATS=() PORT0=$(( 20000 + RANDOM % 20000 ))
for ((r=0; r<NODES; r++)); do
  Q=(-nodefaults -display none -no-reboot -machine q35,memory-backend=mem,hpet=off,smbus=off,sata=off,usb=off,vmport=off
     -object memory-backend-memfd,id=mem,size=${MEM}M,share=on -m "$MEM" -smp "$CPUS" "${ACC[@]}"
     -kernel "$KERNEL" -initrd "$INITRD"
     -append "console=ttyS0 quiet loglevel=5 panic=-1 mitigations=off nokaslr audit=0 apparmor=0 random.trust_cpu=on \
tsc=unstable net.ifnames=0 rxe.fs=$FS rxe.rank=$r rxe.nodes=$NODES"
     -chardev file,id=klog,path="$RUN/klog$r" -serial chardev:klog
     -device virtio-rng-pci -device virtio-serial-pci,max_ports=4)
  # the guest's stdout, stderr and exit status: two pipes and a file
  mkfifo "$RUN/out$r" "$RUN/err$r"
  if [ $NODES -gt 1 ] && [ "$LEADER$r" != 10 ]; then
    sed -u "s/^/[$r] /" < "$RUN/out$r" &  CATS+=($!)
    sed -u "s/^/[$r] /" < "$RUN/err$r" >&2 &  CATS+=($!)
  else
    cat < "$RUN/out$r" &  CATS+=($!)
    cat < "$RUN/err$r" >&2 &  CATS+=($!)
  fi
  Q+=(-chardev file,id=out,path="$RUN/out$r" -device virtserialport,chardev=out,name=rxe.out
      -chardev file,id=err,path="$RUN/err$r" -device virtserialport,chardev=err,name=rxe.err
      -chardev file,id=rc,path="$RUN/rc$r" -device virtserialport,chardev=rc,name=rxe.rc)
  share $r root / ro
  share $r ctl "$CTL" ro
  i=0; for d in "${RW[@]}"; do share $r rw$i "$d" rw; i=$((i+1)); done
  if [ $NODES -gt 1 ]; then
    # one L2 segment: a udp multicast group that never leaves this host (ttl 0 on lo)
    Q+=(-netdev socket,id=n0,mcast=230.0.0.1:$PORT0,localaddr=127.0.0.1
        -device virtio-net-pci,netdev=n0,mac=52:54:00:77:00:0$((r+1)),host_mtu=4200,romfile=)
  fi
  timeout --foreground -k 5 "$TMO" qemu-system-x86_64 "${Q[@]}" </dev/null 2>"$RUN/qemu$r" &
  QPIDS+=($!); PIDS+=($!)
done

worst=0
for ((r=0; r<NODES; r++)); do
  if [ $LEADER = 1 ] && [ $r -gt 0 ]; then
    kill "${QPIDS[$r]}" 2>/dev/null || true; wait "${QPIDS[$r]}" 2>/dev/null || true
    continue
  fi
  q=0; wait "${QPIDS[$r]}" || q=$?
  if [ -s "$RUN/rc$r" ]; then rc=$(cat "$RUN/rc$r")
  elif [ $q = 124 ] || [ $q = 137 ]; then
    rc=124; echo "rxe_vm: node $r timed out after ${TMO}s" >&2; tail -n 5 "$RUN/klog$r" >&2
  else
    rc=125; echo "rxe_vm: node $r: the guest did not finish (qemu status $q)" >&2
    cat "$RUN/qemu$r" >&2; tail -n 25 "$RUN/klog$r" >&2
  fi
  if [ -n "$KLOG" ]; then cp "$RUN/klog$r" "$KLOG$([ $NODES = 1 ] || echo .$r)"; fi
  if [ $rc -gt $worst ]; then worst=$rc; fi
done
if [ -s "$RUN/rc0" ]; then for p in "${CATS[@]}"; do wait "$p" || true; done; CATS=(); fi
exit $worst
