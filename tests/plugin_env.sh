# Sourced by run.sh of a plugin's tests: an environment with an engine in it, shared by clones, and this clone's plugin.
NOT_INSTALLED=75 # EX_TEMPFAIL: says nothing about this project

# make_environment VENV VERSIONS MODULE ENGINE: makes VENV with `install_packages PIP..`, which the caller defines, unless
# it holds VERSIONS and can import MODULE. One process at a time; the others wait and find it made.
make_environment() {
  local venv=$1 versions=$2 module=$3 engine=$4
  mkdir -p "$(dirname "$venv")"
  (
    flock 9
    if cmp -s "$versions" "$venv/installed.txt" && "$venv/bin/python" -c "import $module" 2>/dev/null; then exit 0; fi
    rm -f "$venv/installed.txt"
    "${PYTHON:-python3}" -m venv --clear "$venv"
    if ! install_packages "$venv/bin/python" -m pip --quiet --disable-pip-version-check; then
      echo "NOT RUN: pip could not install $engine, so its plugin was not tested." >&2
      exit "$NOT_INSTALLED"
    fi
    cp "$versions" "$venv/installed.txt"
  ) 9> "$venv.lock"
}

# install_plugin VENV: this clone's package, with the entry point by which an engine finds it, in a folder of its own on
# PYTHONPATH, so that clones share VENV and yet each tests itself. Nothing is downloaded.
install_plugin() {
  plugin=$(mktemp -d)
  trap 'rm -rf "$plugin"' EXIT
  rm -rf build # what an earlier build left would be packed again
  "$1/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps --no-build-isolation --target "$plugin" .
  export PYTHONPATH=$plugin${PYTHONPATH:+:$PYTHONPATH}
}
