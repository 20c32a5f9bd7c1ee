#!/usr/bin/env bash
# Starts Ray on this node for a recipe: the head on one machine, then a worker on every other. Ends only what it started.
#   scripts/ray_cluster.sh head   RECIPE [KEY=VALUE]... [OPTION]... [-- OPTION OF RAY START]...
#   scripts/ray_cluster.sh worker RECIPE [KEY=VALUE]... --head HOST[:PORT] [OPTION]... [-- OPTION OF RAY START]...
#   scripts/ray_cluster.sh stop
# Devices, environment and external modules are the recipe's; the network interface is this node's. Options:
#   --print             show what would be exported and started; start nothing
#   --ip ADDRESS        this node's address (default: the one on the way to the head, or on the default route)
#   --interface NAME    network interface of collectives (default: the one with that address)
#   --devices N         devices this node offers (default: as many as the recipe takes of a node); 0 for a head without
#   --port N            the head's port (6379), and --dashboard-port N its dashboard's (8265)
#   --wait SECONDS      how long a worker waits for the head, and the start for Ray (600)
# RECIPES_PYTHON is the interpreter that trains: its Ray is started. RECIPES_RAY_DIR (default: in /tmp) keeps the log and
# what `stop` needs; two nodes on one machine need one each. Then, anywhere in reach of the head's dashboard:
#   recipes run RECIPE launch=ray ray_address=http://HEAD:8265
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
STATE="${RECIPES_RAY_DIR:-/tmp/recipes-ray-$(id -u)}"
MARK=RECIPES_RAY_NODE

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }

# The node this script has started here, if it still runs: sets PID and ID. A later process with that pid has no such mark.
find_node() {
  PID="" ID=""
  [ -r "$STATE/node" ] || return 1
  read -r PID ID <"$STATE/node" || return 1
  [[ "$PID" =~ ^[0-9]+$ && "$ID" =~ ^[0-9a-f-]+$ ]] || die "$STATE/node is none of ours; remove it."
  marked "$PID"
}

marked() { grep -qszxF "$MARK=$ID" "/proc/$1/environ"; }

# Prints the pids of what belongs to the node: all of it inherits the mark.
members() { grep -slzxF "$MARK=$ID" /proc/[0-9]*/environ | cut -d/ -f3; }

stop_node() {
  local left limit
  if ! find_node && [ -z "$ID" ]; then say "no Ray of ours runs here"; return; fi
  mapfile -t left < <(members)
  if [ -n "$PID" ] && marked "$PID"; then kill -TERM "$PID" 2>/dev/null || true; fi
  limit=$((SECONDS + 30))
  while mapfile -t left < <(members) && [ "${#left[@]}" -gt 0 ] && [ "$SECONDS" -lt "$limit" ]; do sleep 0.5; done
  if [ "${#left[@]}" -gt 0 ]; then
    kill -KILL "${left[@]}" 2>/dev/null || true
    say "${#left[@]} processes had to be killed"
  fi
  rm -f "$STATE/node"
  say "stopped"
}

role="${1:-}"
case "$role" in
  -h | --help) usage; exit 0 ;;
  stop) [ "$#" -eq 1 ] || die "stop takes no arguments"; stop_node; exit 0 ;;
  head | worker) shift ;;
  *) usage >&2; exit 2 ;;
esac

recipe="" head="" ip="" interface="" devices="" port=6379 dashboard=8265 deadline=600 print=false overrides=() more=()
while [ "$#" -gt 0 ]; do
  case "$1" in
    --print) print=true; shift ;;
    --) shift; more=("$@"); break ;;
    --head | --ip | --interface | --devices | --port | --dashboard-port | --wait)
      [ "$#" -ge 2 ] || die "$1 needs a value"
      case "$1" in
        --head) head="$2" ;; --ip) ip="$2" ;; --interface) interface="$2" ;; --devices) devices="$2" ;;
        --port) port="$2" ;; --dashboard-port) dashboard="$2" ;; --wait) deadline="$2" ;;
      esac
      shift 2 ;;
    -*) die "unknown option $1 (scripts/ray_cluster.sh --help)" ;;
    *) if [ -z "$recipe" ]; then recipe="$1"; else overrides+=("$1"); fi; shift ;;
  esac
done
[ -n "$recipe" ] || die "which recipe? (scripts/ray_cluster.sh --help)"
for number in "$port" "$dashboard" "$deadline" "${devices:-0}"; do
  [[ "$number" =~ ^[0-9]+$ ]] || die "'$number' is no whole number"
done
if [ "$role" = worker ]; then
  [ -n "$head" ] || die "a worker needs --head HOST[:PORT]"
  if [[ "$head" =~ ^(.+):([0-9]+)$ ]]; then head="${BASH_REMATCH[1]}" port="${BASH_REMATCH[2]}"; fi
elif [ -n "$head" ]; then
  die "--head is for a worker; the head's own address is --ip"
fi

# ---- what the recipe wants of this node ----
workbook="$ROOT/.venv/bin/python"
PYTHON="${RECIPES_PYTHON:-$workbook}"
if [ ! -x "$workbook" ]; then workbook="$PYTHON"; fi
command -v "$PYTHON" >/dev/null || die "no interpreter $PYTHON: run scripts/quickstart.sh, or set RECIPES_PYTHON to the one that trains"
RESOURCE="" DEVICES=0 CPUS="" OBJECT_STORE="" OPEN_FILES=0 SHM_BYTES=0 ADDRESS=""
asked=("$workbook" -m recipes.ray_node "$recipe" "${overrides[@]}")
if [ -n "$head" ]; then asked+=(--head "$head"); fi
if [ -n "$ip" ]; then asked+=(--ip "$ip"); fi
if [ -n "$interface" ]; then asked+=(--interface "$interface"); fi
told="$(PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" "${asked[@]}")" || exit 2
eval "$told"
if [ -n "$devices" ]; then DEVICES="$devices"; fi

# ---- the command ----
resources="{\"$RESOURCE\": $DEVICES}"
if [ "$DEVICES" -eq 0 ]; then resources="{}"; fi
command=("$PYTHON" -m ray.scripts.scripts start --block --disable-usage-stats "--node-ip-address=$ADDRESS"
  "--resources=$resources" --dashboard-agent-listen-port=0)
if [ -n "$CPUS" ]; then command+=("--num-cpus=$CPUS"); fi
if [ -n "$OBJECT_STORE" ]; then command+=("--object-store-memory=$OBJECT_STORE"); fi
if [ "$role" = head ]; then
  # The dashboard takes jobs, so whoever reaches it runs code here: it listens on the cluster's own address only.
  command+=(--head "--port=$port" "--dashboard-host=$ADDRESS" "--dashboard-port=$dashboard" "--temp-dir=$STATE/ray")
else
  command+=("--address=$head:$port")
fi
command+=("${more[@]}")
# A head uses a token that is there by itself, a worker does not (Ray 2.60), and is then refused.
if [ -n "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ] || [ -r "${HOME:-}/.ray/auth_token" ]; then
  export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
elif [ "$role" = head ]; then
  say "warning: there is no token, so everybody who reaches $ADDRESS:$dashboard can run code here."
  say "         Make one with 'ray get-auth-token --generate' and copy ~/.ray/auth_token to every node."
fi

if $print; then
  printf '%s\n' "$told"
  if [ -n "${RAY_AUTH_MODE:-}" ]; then printf 'export RAY_AUTH_MODE=%q\n' "$RAY_AUTH_MODE"; fi
  printf 'ulimit -n %s\n' "$OPEN_FILES"
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi

# ---- limits ----
limit="$(ulimit -Sn)"
if [ "$limit" != unlimited ] && [ "$limit" -lt "$OPEN_FILES" ]; then
  ulimit -Sn "$OPEN_FILES" 2>/dev/null ||
    die "$OPEN_FILES open files are wanted and this shell may have $(ulimit -Hn): raise it where the container or login is set up (--ulimit nofile=$OPEN_FILES)"
fi
free="$(df -P -B1 /dev/shm 2>/dev/null | awk 'NR == 2 { print $4 }')"
if [ -z "$free" ]; then
  say "warning: /dev/shm cannot be looked at"
elif [ "$free" -lt "$SHM_BYTES" ]; then
  say "warning: /dev/shm has $((free >> 20)) MiB free, and a run may put $((SHM_BYTES >> 20)) MiB there: start the container with --shm-size"
fi

# ---- start ----
(umask 077 && mkdir -p "$STATE")
[ -O "$STATE" ] || die "$STATE belongs to somebody else: set RECIPES_RAY_DIR"
if find_node; then die "a Ray of ours runs here already (pid $PID); 'scripts/ray_cluster.sh stop' ends it"; fi
ends=$((SECONDS + deadline))
if [ "$role" = worker ]; then
  until (: <"/dev/tcp/$head/$port") 2>/dev/null; do
    [ "$SECONDS" -lt "$ends" ] || die "no head answers at $head:$port within $deadline s: is it started, and is the port open?"
    [ -n "${waiting:-}" ] || say "waiting for the head at $head:$port"
    waiting=yes
    sleep 1
  done
fi

# Starts Ray once, and waits until it stands, has failed, or the time is over.
start_node() {
  ID="$(cat /proc/sys/kernel/random/uuid)"
  : >"$STATE/node.log"
  env "$MARK=$ID" setsid "${command[@]}" </dev/null >"$STATE/node.log" 2>&1 &
  PID=$!
  disown
  echo "$PID $ID" >"$STATE/node"
  until grep -q "Ray runtime started" "$STATE/node.log"; do
    [ "$SECONDS" -lt "$ends" ] && kill -0 "$PID" 2>/dev/null || return 1
    sleep 0.5
  done
}

# A node that starts while the head is busy may give up after 30 s (Ray 2.60): a few times is enough to tell.
trap 'stop_node; exit 130' INT TERM
for try in 1 2 3; do
  if start_node; then break; fi
  tail -n 5 "$STATE/node.log" >&2
  stop_node 2>/dev/null
  if [ "$SECONDS" -ge "$ends" ]; then die "Ray did not start within $deadline s (above: the end of $STATE/node.log)"; fi
  if [ "$try" = 3 ] || [ "$role" = head ]; then die "Ray did not start (above: the end of $STATE/node.log)"; fi
  say "Ray did not start (above: why); trying again"
done
trap - INT TERM
say "$role started on $ADDRESS with $DEVICES $RESOURCE (pid $PID, log $STATE/node.log)"
if [ "$role" = head ]; then
  say "on each of the other nodes:  scripts/ray_cluster.sh worker $recipe --head $ADDRESS:$port"
  say "then:  recipes run $recipe launch=ray ray_address=http://$ADDRESS:$dashboard"
fi
