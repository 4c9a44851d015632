#!/bin/sh
# Runs the program that the container was given, by its path.
#
# The base's own entrypoint prints a banner, which would spoil the programs' JSON on stdout. What it does
# for CUDA is kept: /etc/shinit_v2 puts the newer user-mode driver of the image on the library path where
# the host's driver is older than the image's CUDA.
if [ "$#" -eq 0 ]; then
    echo "found: no program; needed: one by its path; do: name one, e.g. /opt/tensorfold/bin/tf-dsv41-check" >&2
    exit 2
fi
if [ -r /etc/shinit_v2 ]; then
    . /etc/shinit_v2 >/dev/null 2>&1
fi
exec "$@"
