"""The command line.

app              the commands; options: their options
run, publish     jobs; machines: parts and clusters; check: validate and report
fit              will it fit; fit_options, fit_view, fit_serving: its options, tables, serve commands
calibrate        the pass that makes statistics; calibrate_options: its options
views            plans, runs, states; inspection_view: inspections; validation_view: validations
console          stdout and stderr; progress: bars and progress lines
interrupts       Ctrl-C and SIGTERM; failures: what the machine refuses, in one line
"""
