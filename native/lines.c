/* The journal's lines: the sockets of a daemon's connections.
 *
 * Lines is an epoll instance of its own, whose descriptor the event loop watches. `turn` reads every line that has
 * something and returns the requests; `respond` and `notify` write replies into the buffer of their line; `flush` sends what was written. Bytes that are no whole, ordinary requests go to virta/journal/serving/connections.py, whose parser
 * decides every doubt; a line is `raw` until that parser has used them up.
 *
 * Bounded: a line holds UNREAD_BYTES_MAX of replies and one more, then it is cut; it is not read from while more than
 * WRITE_HIGH_BYTES wait or more than UNANSWERED_MAX requests are unanswered; a turn reads
 * IN_BYTES of EVENTS_MAX lines. A line ends inside `turn` and `close` only, so that Python hears of every end. */
#include "journal.h"
#if defined(__linux__)
#include "line.h"

/* --- all lines --- */

/* (encode, unanswered_max, write_high_bytes, unread_bytes_max, look_ns) */
static PyObject *lines_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)kwargs;
    PyObject *encode;
    Py_ssize_t unanswered, high, unread;
    long long look;
    if (!PyArg_ParseTuple(args, "OnnnL", &encode, &unanswered, &high, &unread, &look)) return NULL;
    Lines *self = (Lines *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->encode = Py_NewRef(encode);
    self->unanswered_max = unanswered;
    self->write_high_bytes = high;
    self->unread_bytes_max = unread;
    look_init(&self->look, look);
    if ((self->epoll = epoll_create1(EPOLL_CLOEXEC)) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyObject *lines_fileno(Lines *self, PyObject *unused)
{
    (void)unused;
    return PyLong_FromLong(self->epoll);
}

/* (descriptor, owner) -> Line; the descriptor is its own from now on */
static PyObject *lines_add(Lines *self, PyObject *args)
{
    int fd, on = 1;
    PyObject *owner;
    if (!PyArg_ParseTuple(args, "iO", &fd, &owner)) return NULL;
    Line *line = PyObject_GC_New(Line, &line_type);
    if (!line) return NULL;
    memset((char *)line + sizeof(PyObject), 0, sizeof *line - sizeof(PyObject));
    out_init(&line->out);
    line->home = self;
    line->fd = -1;
    line->events = EPOLLIN;
    line->owner = Py_NewRef(owner);
    PyObject_GC_Track(line);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* no TCP, no delay */
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = line};
    if (epoll_ctl(self->epoll, EPOLL_CTL_ADD, fd, &event) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(line);
        return NULL;
    }
    line->fd = fd;
    line->next = self->first;
    if (self->first) self->first->before = line;
    self->first = (Line *)Py_NewRef(line);
    self->count++;
    return (PyObject *)line;
}

/* Tell Python (owner, requests, rest); requests None: the line has ended, and rest says whether it was cut. Steals both. */
static int tell(PyObject *found, Line *line, PyObject *requests, PyObject *rest)
{
    PyObject *item = requests && rest ? PyTuple_New(3) : NULL;
    if (!item) {
        Py_XDECREF(requests);
        Py_XDECREF(rest);
        return 0;
    }
    PyTuple_SET_ITEM(item, 0, Py_NewRef(line->owner ? line->owner : Py_None));
    PyTuple_SET_ITEM(item, 1, requests);
    PyTuple_SET_ITEM(item, 2, rest);
    int good = PyList_Append(found, item) == 0;
    Py_DECREF(item);
    return good;
}

static int tell_end(PyObject *found, Line *line)
{
    line_end(line);
    int good = tell(found, line, Py_NewRef(Py_None), PyBool_FromLong(line->cut));
    Py_CLEAR(line->owner); /* it holds the line in turn */
    Py_DECREF(line);
    return good;
}

/* The whole requests among the bytes that are left, up to a QUIT. */
static PyObject *line_requests(Line *line, In *in)
{
    PyObject *requests = PyList_New(0);
    while (requests && !line->raw && !line->quitting && in->at < in->end) {
        In next = *in;
        Ask ask;
        if (!journal_get_ask(&next, &ask)) {
            line->raw = 1;
            break;
        }
        PyObject *request = journal_request_of(&ask);
        line->quitting = ask.function == QUIT;
        if (!request || PyList_Append(requests, request) < 0) Py_CLEAR(requests);
        Py_XDECREF(request);
        *in = next;
    }
    return requests;
}

/* What came, for Python. */
static int line_decode(PyObject *found, Line *line, size_t size)
{
    Lines *home = line->home;
    In in = {home->in, home->in + size};
    PyObject *requests = line_requests(line, &in);
    if (!requests) return 0;
    line->unanswered += PyList_GET_SIZE(requests);
    PyObject *rest = Py_NewRef(Py_None);
    if (in.at < in.end && !line->quitting)
        Py_SETREF(rest, PyBytes_FromStringAndSize((const char *)in.at, in.end - in.at));
    return tell(found, line, requests, rest);
}

static int line_read(PyObject *found, Line *line)
{
    ssize_t size = recv(line->fd, line->home->in, IN_BYTES, MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 1;
    if (size < 0) return tell_end(found, line);
    if (size == 0) {
        line->ended = 1;
        if (!pending(line)) return tell_end(found, line);
        regulate(line);
        return 1;
    }
    if (!line_decode(found, line, (size_t)size)) return 0;
    if (line->quitting || line->unanswered > line->home->unanswered_max) regulate(line);
    return 1;
}

static int line_event(PyObject *found, Line *line, uint32_t events)
{
    if (line->fd < 0) return 1;
    if (events & EPOLLOUT) {
        line_settle(line);
        if (line->ended && !pending(line)) return tell_end(found, line);
    }
    if (line->events & EPOLLIN) return events & (EPOLLIN | EPOLLHUP | EPOLLERR) ? line_read(found, line) : 1;
    return events & (EPOLLHUP | EPOLLERR) ? tell_end(found, line) : 1;
}

/* Look for so long; whether there is something now. What it is will be asked again under the lock. */
static int lines_look(Lines *self, int64_t began)
{
    struct epoll_event event;
    int found, epoll = self->epoll;
    Moment moment = look_begin(&self->look, began);
    Py_BEGIN_ALLOW_THREADS
    do found = epoll_wait(epoll, &event, 1, 0);
    while (found == 0 && look_on(&moment));
    Py_END_ALLOW_THREADS
    look_judge(&self->look, found > 0, &moment);
    self->looked += found > 0;
    return found > 0;
}

/* How long the one line that is in use was waited for; with several, looking for the next is not worth it. */
static void lines_learn(Lines *self, struct epoll_event *events, int count)
{
    Line *line = count == 1 ? events[0].data.ptr : NULL;
    if (line && line == self->lone) look_learn(&self->look, self->idle_since ? now_ns() - self->idle_since : 0);
    else look_init(&self->look, self->look.limit);
    self->lone = line;
    self->idle_since = 0;
}

static int lines_round(PyObject *found, struct epoll_event *events, int count)
{
    int good = 1;
    for (int i = 0; i < count; i++) Py_INCREF(events[i].data.ptr);
    for (int i = 0; i < count; i++) {
        if (good) good = line_event(found, events[i].data.ptr, events[i].events);
        Py_DECREF(events[i].data.ptr);
    }
    return good;
}

static void lines_send(Lines *self)
{
    Line *line = self->dirty;
    self->dirty = NULL;
    while (line) {
        Line *next = line->next_dirty;
        line->next_dirty = NULL;
        line->dirty = 0;
        if (line->fd >= 0 && !line->ended) line_settle(line);
        Py_DECREF(line);
        line = next;
    }
}

/* (look) -> [(owner, requests, rest)]: everything that came, after looking for a moment if that is worth it */
static PyObject *lines_turn(Lines *self, PyObject *look)
{
    struct epoll_event events[EVENTS_MAX];
    if (self->turning || self->epoll < 0) {
        PyErr_SetString(PyExc_RuntimeError, self->turning ? "turn inside a turn" : "the lines are closed");
        return NULL;
    }
    PyObject *found = PyList_New(0);
    if (!found) return NULL;
    int count = epoll_wait(self->epoll, events, EVENTS_MAX, 0);
    if (count == 0) {
        int64_t now = now_ns();
        if (!self->idle_since) self->idle_since = now;
        if (look == Py_True && self->lone && look_worthwhile(&self->look) && lines_look(self, now))
            count = epoll_wait(self->epoll, events, EVENTS_MAX, 0);
    }
    if (count <= 0) return found;
    lines_learn(self, events, count);
    self->turning = 1;
    int good = lines_round(found, events, count);
    self->turning = 0;
    if (!good) Py_CLEAR(found);
    return found;
}

static PyObject *lines_flush(Lines *self, PyObject *unused)
{
    (void)unused;
    lines_send(self);
    Py_RETURN_NONE;
}

/* -> the owners of the lines that were left */
static PyObject *lines_close(Lines *self, PyObject *unused)
{
    (void)unused;
    PyObject *owners = PyList_New(0), *none = owners ? lines_flush(self, NULL) : NULL;
    if (!none) return NULL;
    Py_DECREF(none);
    int good = 1;
    while (self->first) {
        Line *line = self->first;
        line_end(line);
        if (line->owner) good &= PyList_Append(owners, line->owner) == 0;
        Py_CLEAR(line->owner);
        Py_DECREF(line);
    }
    if (self->epoll >= 0) close(self->epoll);
    self->epoll = -1;
    if (!good) Py_CLEAR(owners);
    return owners;
}

static int lines_traverse(Lines *self, visitproc visit, void *arg)
{
    Py_VISIT(self->encode);
    for (Line *line = self->first; line; line = line->next) Py_VISIT(line);
    for (Line *line = self->dirty; line; line = line->next_dirty) Py_VISIT(line);
    return 0;
}

static int lines_clear(Lines *self)
{
    Py_XDECREF(lines_close(self, NULL));
    PyErr_Clear();
    Py_CLEAR(self->encode);
    return 0;
}

static void lines_dealloc(Lines *self)
{
    PyObject_GC_UnTrack(self);
    lines_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* --- what Python sees --- */

static PyMethodDef line_methods[] = {
    {"notify", (PyCFunction)line_notify, METH_O, "Send a message by itself."},
    {"respond", (PyCFunction)line_respond, METH_O, "Send the reply to a request."},
    {"asked", (PyCFunction)line_asked, METH_O, "So many requests more are to be answered."},
    {"abort", (PyCFunction)line_abort, METH_NOARGS, "End at once."},
    {"quit", (PyCFunction)line_quit, METH_NOARGS, "Read no more; end when everything is answered and sent."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef line_members[] = {
    {"raw", T_BOOL, offsetof(Line, raw), 0, "Whether its bytes are given out as they come."},
    {"unanswered", T_PYSSIZET, offsetof(Line, unanswered), READONLY, "Requests without a reply."},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *line_unread(Line *line, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(pending(line));
}

static PyGetSetDef line_getset[] = {
    {"unread", (getter)line_unread, NULL, "Bytes of replies that were not sent yet.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject line_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "virta.journal._native.Line",
    .tp_basicsize = sizeof(Line),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)line_dealloc,
    .tp_traverse = (traverseproc)line_traverse,
    .tp_clear = (inquiry)line_clear,
    .tp_methods = line_methods,
    .tp_members = line_members,
    .tp_getset = line_getset,
};

static PyMethodDef lines_methods[] = {
    {"add", (PyCFunction)lines_add, METH_VARARGS, "Take a connected socket's descriptor."},
    {"turn", (PyCFunction)lines_turn, METH_O, "Read everything that came."},
    {"flush", (PyCFunction)lines_flush, METH_NOARGS, "Send everything that was answered."},
    {"fileno", (PyCFunction)lines_fileno, METH_NOARGS, "Readable when `turn` has something to do."},
    {"close", (PyCFunction)lines_close, METH_NOARGS, "End all lines; their owners."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef lines_members[] = {
    {"count", T_PYSSIZET, offsetof(Lines, count), READONLY, "Lines there are."},
    {"looked", T_LONGLONG, offsetof(Lines, looked), READONLY, "How often looking found something."},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject lines_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "virta.journal._native.Lines",
    .tp_basicsize = sizeof(Lines),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = lines_new,
    .tp_dealloc = (destructor)lines_dealloc,
    .tp_traverse = (traverseproc)lines_traverse,
    .tp_clear = (inquiry)lines_clear,
    .tp_methods = lines_methods,
    .tp_members = lines_members,
};

int journal_add_lines(PyObject *module)
{
    return PyModule_AddType(module, &line_type) < 0 ? -1 : PyModule_AddType(module, &lines_type);
}

#else
int journal_add_lines(PyObject *module)
{
    (void)module;
    return 0;
}
#endif
