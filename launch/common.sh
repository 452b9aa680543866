# Sourced by tpu_vm.sh and gpu.sh: runs the lines of `jaxroll launch` in parallel and ends them together.

# $PYTHON, else the interpreter that the shell finds, else that of `make demo` and `make venv`.
VENV_PYTHON="$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python"
if ! "${PYTHON:-python3}" -c 'import ml_collections' 2>/dev/null; then
  if [[ -n "${PYTHON:-}" || ! -x "$VENV_PYTHON" ]]; then
    echo "error: PYTHON = '${PYTHON:-python3}': this interpreter lacks the packages of JaxRoll. Install them (make venv), or name another interpreter." >&2
    exit 64
  fi
  PYTHON="$VENV_PYTHON"
fi
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
