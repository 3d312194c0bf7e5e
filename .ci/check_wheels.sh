#!/usr/bin/env bash
# PYTHON names the Python to check with; by default that of the environment.
# Build all five distributions, and check that the torch-free ones work with what they declare and
# nothing else. The two that need torch are not installed here: an index may offer one for CUDA, of
# several gigabytes; what they declare is checked by tests/test_release.py, and that they import
# nothing else by tests/test_imports.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-$(hatch run python -c "import sys; print(sys.executable)")}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
dist=$work/dist

for package in packages/*/; do
  (cd "$package" && hatch build "$dist")
done
ls -l "$dist"
for package in packages/*/; do
  name=$(basename "$package" | tr - _)
  for file in "$dist/$name"-*.tar.gz "$dist/$name"-*.whl; do
    [ -f "$file" ] || { echo "not built: $file" >&2; exit 1; }
  done
done

# The wheels are named one by one, so that no index can offer another distribution in their place.
install() {
  local venv=$work/$1
  shift
  "$python" -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --find-links "$dist" "$@"
  "$venv/bin/pip" check
  if "$venv/bin/python" -c "import torch" 2> /dev/null; then
    echo "torch was installed along with $*" >&2
    exit 1
  fi
}

install graph "$dist"/remat_graph-*.whl
"$work/graph/bin/python" .ci/without_torch.py graph

install partition "$dist"/remat_graph-*.whl "$dist"/remat_partition-*.whl
"$work/partition/bin/python" .ci/without_torch.py partition

install solvers "$dist"/remat_graph-*.whl "$dist"/remat_solvers-*.whl
"$work/solvers/bin/python" .ci/without_torch.py solvers

echo "wheels: ok"
