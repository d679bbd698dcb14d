#!/usr/bin/env bash
# A Chromium for the browser tests, from the distribution's packages; does nothing where there is one.
set -euo pipefail

for name in "${CHROMIUM:-}" chromium chromium-browser google-chrome google-chrome-stable; do
    if [ -n "$name" ] && command -v "$name" > /dev/null; then
        echo "Browser: $(command -v "$name")"
        exit 0
    fi
done
if ! command -v apt-get > /dev/null || [ "$(id -u)" != 0 ]; then
    echo "No Chromium found; install one with your package manager, or set CHROMIUM to its path." >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends chromium > /dev/null
chromium --version
