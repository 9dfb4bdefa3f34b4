"""The writing side: the kernel (native or plain Python), and the writer on top of it."""
