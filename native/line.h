/* A line: the socket of one connection of a daemon, what is to be sent on it, and its place among the others (lines.c). */
#ifndef VIRTA_LINE_H
#define VIRTA_LINE_H
#include "journal.h"
#include "look.h"
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <structmember.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define IN_BYTES 65536
#define EVENTS_MAX 256
#define QUIT 1
/* A buffer of replies that grew beyond this is given back once it is empty. */
#define KEPT_BYTES 65536


typedef struct Lines Lines;
typedef struct Line {
    PyObject_HEAD
    Lines *home;                /* borrowed: it closes its lines before it goes */
    struct Line *before, *next; /* all lines of a home; each holds a reference */
    struct Line *next_dirty;    /* those with something to send; each holds a reference */
    PyObject *owner;            /* what `turn` calls it */
    int fd;                     /* -1 after its end */
    uint32_t events;            /* what epoll was asked for */
    Py_ssize_t unanswered;
    size_t sent;                /* of what is in `out` */
    Out out;
    char raw, full, quitting, ended, cut, dirty;
} Line;

struct Lines {
    PyObject_HEAD
    int epoll, turning;
    Line *first, *dirty;
    PyObject *encode;           /* (reply) -> bytes, for replies that are out of the ordinary */
    Py_ssize_t count, unanswered_max, write_high_bytes, unread_bytes_max;
    Look look;
    Line *lone;                 /* never followed: whether the last turn had one line, and which */
    int64_t idle_since, looked; /* when there was nothing more to do; how often looking found something */
    uint8_t in[IN_BYTES];
};

static PyTypeObject line_type, lines_type;

static inline size_t pending(const Line *line) { return line->out.size - line->sent; }

static void regulate(Line *line)
{
    int stop = line->quitting || line->ended || line->full || line->unanswered > line->home->unanswered_max;
    uint32_t events = (stop ? 0 : EPOLLIN) | (pending(line) ? EPOLLOUT : 0);
    if (events == line->events) return;
    struct epoll_event event = {.events = events, .data.ptr = line};
    if (epoll_ctl(line->home->epoll, EPOLL_CTL_MOD, line->fd, &event) == 0) line->events = events;
}

/* No more of it: epoll reports the hang-up, and the next turn ends it. */
static void hang_up(Line *line)
{
    out_release(&line->out);
    line->sent = 0;
    line->ended = 1;
    shutdown(line->fd, SHUT_RDWR);
    regulate(line);
}

static void line_send(Line *line)
{
    while (pending(line)) {
        ssize_t sent = send(line->fd, line->out.data + line->sent, pending(line), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent > 0) line->sent += (size_t)sent;
        else if (errno == EINTR) continue;
        else if (errno == EAGAIN || errno == EWOULDBLOCK) break;
        else { hang_up(line); return; }
    }
    Out *out = &line->out;
    if (!pending(line)) {
        if (out->room > KEPT_BYTES) out_release(out);
        out->size = line->sent = 0;
    } else if (line->sent > out->size / 2) {
        memmove(out->data, out->data + line->sent, pending(line));
        out->size -= line->sent;
        line->sent = 0;
    }
    size_t high = (size_t)line->home->write_high_bytes;
    if (pending(line) > high) line->full = 1;
    else if (pending(line) <= high / 4) line->full = 0;
}

/* Send what waits, and hang up if that was the last. */
static void line_settle(Line *line)
{
    line_send(line);
    if (line->fd < 0 || line->ended) return;
    if (line->quitting && line->unanswered <= 0 && !pending(line)) hang_up(line);
    else regulate(line);
}

static void mark_dirty(Line *line)
{
    if (line->dirty) return;
    line->dirty = 1;
    line->next_dirty = line->home->dirty;
    line->home->dirty = (Line *)Py_NewRef(line);
}

/* Something is to be sent; who does not read it is cut. */
static void wrote(Line *line)
{
    mark_dirty(line);
    if (pending(line) <= (size_t)line->home->write_high_bytes) return;
    line_send(line);
    if (!line->ended && pending(line) > (size_t)line->home->unread_bytes_max) {
        line->cut = 1;
        hang_up(line);
    }
}

static PyObject *line_notify(Line *line, PyObject *reply)
{
    if (line->fd < 0 || line->ended) Py_RETURN_NONE;
    Out *out = &line->out;
    size_t begin = out->size;
    enum outcome found = journal_put_reply(out, reply);
    if (found != WRITTEN) out->size = begin;
    if (found == FAILED) return NULL;
    if (found == DOUBT) {
        PyObject *bytes = PyObject_CallOneArg(line->home->encode, reply);
        if (!bytes) return NULL;
        if (!PyBytes_Check(bytes)) {
            Py_DECREF(bytes);
            PyErr_SetString(PyExc_TypeError, "encode must return bytes");
            return NULL;
        }
        size_t size = (size_t)PyBytes_GET_SIZE(bytes);
        uint8_t *p = line->fd < 0 ? NULL : journal_extend(out, size);
        if (p) memcpy(p, PyBytes_AS_STRING(bytes), size);
        Py_DECREF(bytes);
        if (!p && PyErr_Occurred()) return NULL;
        if (!p) Py_RETURN_NONE;
    }
    wrote(line);
    Py_RETURN_NONE;
}

static PyObject *line_respond(Line *line, PyObject *reply)
{
    line->unanswered--;
    return line_notify(line, reply);
}

/* (number): so many more requests are to be answered */
static PyObject *line_asked(Line *line, PyObject *number)
{
    Py_ssize_t more = PyNumber_AsSsize_t(number, PyExc_OverflowError);
    if (more == -1 && PyErr_Occurred()) return NULL;
    line->unanswered += more;
    if (line->fd >= 0 && line->unanswered > line->home->unanswered_max) regulate(line);
    Py_RETURN_NONE;
}

static PyObject *line_quit(Line *line, PyObject *unused)
{
    (void)unused;
    line->quitting = 1;
    if (line->fd >= 0 && !line->ended) mark_dirty(line);
    Py_RETURN_NONE;
}

static PyObject *line_abort(Line *line, PyObject *unused)
{
    (void)unused;
    if (line->fd >= 0 && !line->ended) hang_up(line);
    Py_RETURN_NONE;
}

static int line_traverse(Line *line, visitproc visit, void *arg)
{
    Py_VISIT(line->owner);
    return 0;
}

static int line_clear(Line *line)
{
    Py_CLEAR(line->owner);
    return 0;
}

static void line_dealloc(Line *line)
{
    PyObject_GC_UnTrack(line);
    Py_CLEAR(line->owner);
    out_release(&line->out);
    PyObject_GC_Del(line);
}

/* Out of its home and closed; the reference the home had is the caller's. */
static void line_end(Line *line)
{
    Lines *home = line->home;
    *(line->before ? &line->before->next : &home->first) = line->next;
    if (line->next) line->next->before = line->before;
    if (home->lone == line) home->lone = NULL;
    line->before = line->next = NULL;
    home->count--;
    /* Closing is not enough: while a process is being started, its copy of the descriptor keeps reporting. */
    epoll_ctl(home->epoll, EPOLL_CTL_DEL, line->fd, NULL);
    close(line->fd);
    line->fd = -1;
    out_release(&line->out);
    line->sent = 0;
}

#endif
