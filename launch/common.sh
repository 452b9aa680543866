# Sourced by tpu_vm.sh and gpu.sh: runs the lines of `jaxroll launch` in parallel and ends them together.

PYTHON="${PYTHON:-python3}"

launch() {
  local target="$1" word plan line
  local -a pids=()
  shift
  for word in "$@"; do
    case "$word" in
      --dry-run) exec "$PYTHON" -m jaxroll launch --target="$target" "$@" ;;
      -h | --help) exec "$PYTHON" -m jaxroll launch --help ;;
    esac
  done
  plan="$("$PYTHON" -m jaxroll launch --target="$target" "$@")"
  trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
  trap 'exit 130' INT TERM
  while IFS= read -r line; do
    bash -c "$line" &
    pids+=("$!")
  done <<<"$plan"
  wait
}
