"""Names of files and folders of a build that more than one room knows."""

SOURCE = "source"  # the checkpoint's files
RECEIPT = ".receipt.json"  # ends the name of a receipt
