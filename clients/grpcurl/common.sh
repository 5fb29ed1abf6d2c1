# Sourced by every example: finds the cluster, carries the token, calls with reflection.
#
#   MEGASCALE_RUN_FOLDER  run folder of the cluster (default runs/current): addresses and token are read from it
#   MEGASCALE_ADDRESS     host:port to call instead of the address in the run folder
#   MEGASCALE_TOKEN       the cluster token instead of the run folder's
#   MEGASCALE_CA          PEM file of the servers' authority: TLS instead of plain loopback
#   WATCH_S               seconds after which a watch ends (default: it ends with Ctrl-C)
#   GRPCURL               the grpcurl program
set -eu

run_folder=${MEGASCALE_RUN_FOLDER:-runs/current}
GRPCURL=${GRPCURL:-grpcurl}
DEADLINE_S=130 # longer than the driver gives a node for its self-checks
STATUS_TIME_IS_UP=124 # of timeout(1)

fail() {
  echo "$1" >&2
  exit 2
}

# usage MINIMUM "$#" "arguments and what they are"
usage() {
  [ "$2" -ge "$1" ] || fail "usage: ${0##*/} $3"
}

read_file() {
  [ -r "$1" ] || fail "$1 does not exist: is the cluster up? Set MEGASCALE_RUN_FOLDER to its run folder."
  cat "$1"
}

driver() { echo "${MEGASCALE_ADDRESS:-$(read_file "$run_folder/driver.address")}"; }
executor() { echo "${MEGASCALE_ADDRESS:-$(read_file "$run_folder/nodes/$1/executor.address")}"; }
checkpoint() { echo "${MEGASCALE_ADDRESS:-$(read_file "$run_folder/nodes/$1/checkpoint.address")}"; }

# A JSON string of any text of one line.
quote() {
  printf '"%s"' "$(printf '%s' "$1" | sed 's/\\/\\\\/g; s/"/\\"/g')"
}

# A JSON list of strings.
list() {
  separator=''
  printf '['
  for item in "$@"; do
    printf '%s%s' "$separator" "$(quote "$item")"
    separator=', '
  done
  printf ']'
}

# Makes a repeated call safe: the same id and request return the same result.
request_id() { cat /proc/sys/kernel/random/uuid; }

# grpcurl with token and transport. grpcurl itself expands the token, so the process list never shows it.
run_grpcurl() {
  MEGASCALE_TOKEN=${MEGASCALE_TOKEN:-$(read_file "$run_folder/token")}
  export MEGASCALE_TOKEN
  if [ -n "${MEGASCALE_CA:-}" ]; then
    set -- -cacert "$MEGASCALE_CA" "$@"
  else
    set -- -plaintext "$@"
  fi
  # shellcheck disable=SC2016
  ${LIMIT_S:+timeout --foreground "$LIMIT_S"} "$GRPCURL" -expand-headers -H 'authorization: Bearer ${MEGASCALE_TOKEN}' \
    -H "megascale-actor: ${USER:-operator}" "$@"
}

# call ADDRESS Service/Method JSON: one call of megascale.v1.
call() {
  run_grpcurl -max-time "$DEADLINE_S" -d "$3" "$1" "megascale.v1.$2"
}

# watch ADDRESS Service/Method JSON: a stream, until it ends, or WATCH_S have passed, or Ctrl-C.
# Not -max-time: a deadline in the middle of a message makes grpcurl report an internal error of the server.
watch() {
  LIMIT_S=${WATCH_S:-}
  status=0
  run_grpcurl -d "$3" "$1" "megascale.v1.$2" || status=$?
  [ "$status" -eq 0 ] || [ "$status" -eq "$STATUS_TIME_IS_UP" ] || return "$status"
}
