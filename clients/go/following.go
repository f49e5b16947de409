package astraflow

import (
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/grpclog"
)

// A file written later than this ago is read again even if it looks the same: it may be written twice within one tick of
// its clock.
const settled = time.Second

var logger = grpclog.Component("astraflow")

// following has the connection that the files of a client's options say now. Calls that began over an earlier one end
// there, and the last closes it. What is not usable is logged and leaves in force what was before.
type following struct {
	read func() (*settings, error)

	mutex   sync.Mutex
	now     *opened
	looked  []os.FileInfo
	problem string
	reached bool
	closed  bool
}

// opened is a connection and how many calls use it.
type opened struct {
	*settings
	connection *grpc.ClientConn
	calls      int
	isRetired  bool
}

func follow(read func() (*settings, error)) (*following, error) {
	first, err := read()
	if err != nil {
		return nil, err
	}
	connection, err := first.dial()
	if err != nil {
		return nil, err
	}
	// Without a look of before, the first call reads again: the files may have changed since.
	return &following{read: read, now: &opened{settings: first, connection: connection}}, nil
}

// take returns the connection for one call, which then tells its end by done.
func (f *following) take() *opened {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	f.lookAgain()
	f.now.calls++
	return f.now
}

func (f *following) done(used *opened) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	used.calls--
	used.closeUnused()
}

// answered says that the server has answered once.
func (f *following) answered() {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	f.reached = true
}

// judged returns err, which is that of a server that does not answer where trust was there and can come back: one side
// has its new files already, the other has not.
func (f *following) judged(err error) error {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	refused, isTyped := err.(*Error)
	switch {
	case !isTyped || refused.Kind() == Retryable:
	case refused.Reason != UntrustedServer:
		f.reached = true // a refusal is an answer
	case f.reached && len(f.now.files) > 0:
		return newError(Unavailable, "%s", refused.Message)
	}
	return err
}

// current returns what the files say now.
func (f *following) current() *settings {
	used := f.take()
	defer f.done(used)
	return used.settings
}

func (f *following) close() error {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	f.closed = true
	return f.now.connection.Close()
}

func (f *following) lookAgain() {
	found := look(f.now.files)
	if f.closed || isSame(f.looked, found) {
		return
	}
	f.looked = found
	changed, err := f.read()
	if err == nil && changed.content == f.now.content {
		f.problem = ""
		return
	}
	var connection *grpc.ClientConn
	if err == nil {
		connection, err = changed.dial()
	}
	if err != nil {
		if f.problem != err.Error() {
			f.problem = err.Error()
			logger.Errorf("what was before stays in force: %v", err)
		}
		return
	}
	f.problem = ""
	before := f.now
	f.now = &opened{settings: changed, connection: connection}
	before.isRetired = true
	before.closeUnused()
}

func (o *opened) closeUnused() {
	if o.isRetired && o.calls == 0 {
		_ = o.connection.Close() // its only error is that it is closed already
	}
}

func look(files []string) []os.FileInfo {
	found := make([]os.FileInfo, len(files))
	for i, file := range files {
		found[i], _ = os.Stat(file) // what cannot be looked at differs from what could
	}
	return found
}

func isSame(before, now []os.FileInfo) bool {
	if len(before) != len(now) {
		return false
	}
	for i, each := range now {
		if each == nil || before[i] == nil || !os.SameFile(before[i], each) || before[i].Size() != each.Size() ||
			!before[i].ModTime().Equal(each.ModTime()) || time.Since(each.ModTime()) < settled {
			return false
		}
	}
	return true
}
