"""The command line: its flags, and the options that they come to. Nothing here opens or builds."""
