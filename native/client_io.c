/* One exchange of the blocking client: send a request, wait for its reply and decode it, in one call.
 *
 * Anything but exactly that reply is returned as the bytes received, for the parser of
 * virta/journal/clients/client.py; a request that cannot be encoded here is declined before anything is sent.
 * The socket blocks, and the system enforces its timeout (SO_RCVTIMEO, SO_SNDTIMEO). */
#include "journal.h"
#include <errno.h>
#include <sys/socket.h>

/* On the stack, as other threads run during the wait; a longer reply continues in the parser. */
enum { RECEIVE_BYTES = 32 * 1024 };

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

/* Send everything; -1 with an error set. After part of a request the connection is useless: the daemon would
 * read the next request as the rest of this one. */
static int send_all(int fd, const uint8_t *data, size_t size)
{
    const uint8_t *begin = data;
    while (size) {
        ssize_t sent;
        Py_BEGIN_ALLOW_THREADS
        sent = send(fd, data, size, MSG_NOSIGNAL);
        Py_END_ALLOW_THREADS
        if (sent < 0 && errno == EINTR && PyErr_CheckSignals() == 0) continue;
        if (sent < 0) {
            if (!PyErr_Occurred()) PyErr_SetFromErrno(PyExc_OSError);
            if (data > begin) shutdown(fd, SHUT_RDWR);
            return -1;
        }
        data += sent;
        size -= (size_t)sent;
    }
    return 0;
}

/* Receive what comes next; -1 with an error set. */
static ssize_t receive(int fd, uint8_t *data, size_t capacity)
{
    for (;;) {
        ssize_t size;
        Py_BEGIN_ALLOW_THREADS
        size = recv(fd, data, capacity, 0);
        Py_END_ALLOW_THREADS
        if (size >= 0) return size;
        if (errno == EINTR && PyErr_CheckSignals() == 0) continue;
        if (!PyErr_Occurred()) PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
}

/* (descriptor, request) -> Reply, bytes received that are anything else, or None: the request is declined */
PyObject *journal_exchange(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 2) return PyErr_Format(PyExc_TypeError, "exchange takes a descriptor and a request");
    long fd = PyLong_AsLong(args[0]);
    if (fd == -1 && PyErr_Occurred()) return NULL;
    Out out;
    out_init(&out);
    enum outcome found = journal_put_request(&out, args[1]);
    int sent = found == WRITTEN ? send_all((int)fd, out.data, out.size) : 0;
    out_release(&out);
    if (found == DECLINED) Py_RETURN_NONE;
    if (found == FAILED || sent < 0) return NULL;
    uint8_t data[RECEIVE_BYTES];
    ssize_t size = receive((int)fd, data, sizeof data);
    if (size < 0) return NULL;
    In in = {data, data + size};
    PyObject *reply = journal_get_reply(&in);
    if (!reply && PyErr_Occurred()) return NULL;
    int identifier = journal_request_identifier(args[1]);
    if (reply && in.at == in.end && journal_reply_identifier(reply) == identifier) return reply;
    Py_XDECREF(reply);
    return PyBytes_FromStringAndSize((const char *)data, size);
}
