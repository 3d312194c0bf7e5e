#!/usr/bin/env bash
# Build all five distributions, and check that the torch-free ones work where there is no torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

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
  hatch run python -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --find-links "$dist" "$@"
  "$venv/bin/pip" check
  if "$venv/bin/python" -c "import torch" 2> /dev/null; then
    echo "torch was installed along with $*" >&2
    exit 1
  fi
}

install partition "$dist"/remat_graph-*.whl "$dist"/remat_partition-*.whl
"$work/partition/bin/python" .ci/without_torch.py partition

install solvers "$dist"/remat_graph-*.whl "$dist"/remat_solvers-*.whl
"$work/solvers/bin/python" .ci/without_torch.py solvers

echo "wheels: ok"
