"""The `EndpointPickerConfig`: decoded strictly, built, checked, shown and followed.

`load` decodes the bytes (`documents`, `decode`, `schema`) and collects `findings`. `build` makes
the plugins (`catalog`, `instances`) and plans each section: `profiles`, `data_layer`, `data_keys`,
`flow_control`. `show` prints the result, `watch` follows the file. `pool_file` is the other file:
endpoints, objectives and rewrites.
"""
