package astraflow

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	dataflowv1 "github.com/astraflow/astraflow/clients/go/astraflow/dataflow/v1"
	rolloutv1 "github.com/astraflow/astraflow/clients/go/astraflow/rollout/v1"
)

const (
	heartbeat      = 2 * time.Second
	minLease       = 300 * time.Millisecond
	maxDetail      = 2_048
	reportPatience = 10 * time.Second
)

// TaskFailed gives a lease back. Reason is a slug of the contract's LeaseFailure.
type TaskFailed struct {
	Reason, Detail string
	Retryable      bool
}

func (failure *TaskFailed) Error() string { return failure.Reason + ": " + failure.Detail }

// Work is what a node works with; only Run is needed.
type Work struct {
	// Run runs the missing members of a lease and pushes their episodes. Its context ends when the server takes the
	// lease away. Return a TaskFailed to give it back; any other error is reported as `workflow_error`.
	Run func(ctx context.Context, lease *rolloutv1.Lease) error
	// State says what the node serves and waits for now; asked before each report to the server, which fills in Tasks
	// and LeasesReceived.
	State func() *dataflowv1.Credits
	// OnVersion is called with the newest version of each policy when the session starts, then with each as it comes.
	OnVersion func(*dataflowv1.Version)
	// Pushes is where Run pushes: it learns what is durable, and pushes again what the server lost.
	Pushes *PushStream
	// OnLost is called when the session was lost and is opened anew.
	OnLost func(error)
	// Drain is how long a node that leaves finishes what it holds.
	Drain time.Duration
}

// WorkSession is a joined node: it takes leases, keeps them while they are worked on, and leaves in order.
//
// A broken stream ends nothing that is leased: the session joins again under the same incarnation, says what it holds,
// and the server's answer decides. Each lease ends as finished, as one reported failure, or as cancelled by the server.
type WorkSession struct {
	// Joined is the server's answer to the last join: the run with its recipe, the newest announced versions, grants.
	Joined *dataflowv1.JoinRunResponse

	client *Client
	me     *dataflowv1.JoinRunRequest
	work   Work
	ended  context.CancelFunc
	tasks  sync.WaitGroup // leases being worked on, and reports under way

	lock        sync.Mutex
	held        map[string]*heldLease
	received    uint64
	drainReason string
	requests    chan *dataflowv1.WorkRequest // of the open stream
	closed      <-chan struct{}              // of the open stream
}

type heldLease struct {
	lease  *rolloutv1.Lease
	cancel context.CancelFunc
	isGone bool // taken away, or given back: its end is not reported
	done   chan struct{}
}

// JoinRun joins the run and returns the session; nothing is leased before Serve. Leave Incarnation out: the server
// counts the starts of a node. A name that another process has is refused; to take your own up after a restart, keep
// Joined.Session and connect WithSession.
func JoinRun(ctx context.Context, client *Client, me *dataflowv1.JoinRunRequest) (*WorkSession, error) {
	joined, err := client.Runs.JoinRun(ctx, me)
	if err != nil {
		return nil, err
	}
	me.Incarnation = joined.GetIncarnation()
	return &WorkSession{Joined: joined, client: client, me: me, held: map[string]*heldLease{}}, nil
}

// Serve works until the server drains the node or ctx ends, then finishes what is held for at most work.Drain, gives
// the rest back, and returns why it ended. The error is that of a server that refuses the node.
func (s *WorkSession) Serve(ctx context.Context, work Work) (string, error) {
	s.work = work
	running, ended := context.WithCancel(context.Background())
	s.ended = ended
	defer ended()
	served := make(chan struct{})
	go func() {
		select {
		case <-ctx.Done():
			s.drain("stopped")
		case <-served:
		}
	}()
	err := s.reconnect(running)
	close(served)
	s.lock.Lock()
	for _, held := range s.held {
		held.isGone = true
		held.cancel()
	}
	reason := s.drainReason
	s.lock.Unlock()
	s.tasks.Wait()
	return reason, err
}

// StateChanged says soon what Work.State returns now, for instance after another version is served.
func (s *WorkSession) StateChanged() { s.sendCredits() }

func (s *WorkSession) reconnect(ctx context.Context) error {
	for failures, hasJoined := 0, true; ctx.Err() == nil; hasJoined = false {
		err := s.rejoin(ctx, hasJoined)
		if err == nil {
			failures = 0
			err = s.converse(ctx)
		}
		if ctx.Err() != nil {
			return nil
		}
		var hint time.Duration
		if err != nil && err != io.EOF {
			refused := asError(err)
			if !mayComeBack(refused) {
				return refused
			}
			failures, hint = failures+1, refused.RetryAfter
			if s.work.OnLost != nil {
				s.work.OnLost(refused)
			}
		}
		pause(ctx, reconnect.wait(failures, hint))
	}
	return nil
}

func (s *WorkSession) rejoin(ctx context.Context, hasJoined bool) error {
	if !hasJoined {
		joined, err := s.client.Runs.JoinRun(ctx, s.me)
		if err != nil {
			return err
		}
		s.Joined, s.me.Incarnation = joined, joined.GetIncarnation()
	}
	if s.work.Pushes != nil {
		s.work.Pushes.DataSet(s.Joined.GetDataIncarnation())
	}
	return nil
}

// converse is one stream: what the session holds, then leases in, receipts, renewals and credits out.
func (s *WorkSession) converse(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	opened, err := s.client.Tasks.Work(ctx)
	if err != nil {
		cancel()
		return err
	}
	requests, writes := make(chan *dataflowv1.WorkRequest, 16), make(chan struct{})
	go func() {
		defer close(writes)
		s.write(ctx, opened, requests)
	}()
	s.lock.Lock()
	s.received, s.requests, s.closed = 0, requests, ctx.Done()
	hello := &dataflowv1.Hello{
		RunId: s.Joined.GetRun().GetRunId(), NodeId: s.me.GetNodeId(), Incarnation: s.me.GetIncarnation(), Held: s.renewal(),
	}
	s.lock.Unlock()
	s.send(&dataflowv1.WorkRequest{Kind: &dataflowv1.WorkRequest_Hello{Hello: hello}})
	s.sendCredits()
	for err == nil {
		var response *dataflowv1.WorkResponse
		if response, err = opened.Recv(); err == nil {
			s.receive(response)
		}
	}
	cancel()
	<-writes
	return err
}

func (s *WorkSession) write(
	ctx context.Context, opened dataflowv1.TaskService_WorkClient, requests <-chan *dataflowv1.WorkRequest,
) {
	ttl := s.Joined.GetLeaseTtlDuration().AsDuration()
	if ttl < minLease {
		ttl = minLease
	}
	renewals, credits := time.NewTicker(ttl/3), time.NewTicker(heartbeat)
	defer renewals.Stop()
	defer credits.Stop()
	for err := error(nil); err == nil; { // the reader learns why a write failed
		select {
		case request := <-requests:
			err = opened.Send(request)
		case <-renewals.C:
			s.lock.Lock()
			renewal := s.renewal()
			s.lock.Unlock()
			if len(renewal.LeaseIds) > 0 {
				err = opened.Send(&dataflowv1.WorkRequest{Kind: &dataflowv1.WorkRequest_Renewal{Renewal: renewal}})
			}
		case <-credits.C:
			err = opened.Send(s.credits())
		case <-ctx.Done():
			return
		}
	}
}

func (s *WorkSession) receive(response *dataflowv1.WorkResponse) {
	switch kind := response.GetKind().(type) {
	case *dataflowv1.WorkResponse_Lease:
		s.accept(kind.Lease)
	case *dataflowv1.WorkResponse_Cancel:
		s.lock.Lock()
		if held := s.held[kind.Cancel.GetLeaseId()]; held != nil {
			held.isGone = true
			held.cancel()
		}
		s.lock.Unlock()
	case *dataflowv1.WorkResponse_Version:
		if s.work.OnVersion != nil {
			s.work.OnVersion(kind.Version)
		}
	case *dataflowv1.WorkResponse_Watermark:
		if s.work.Pushes != nil {
			s.work.Pushes.Durable(kind.Watermark)
		}
	case *dataflowv1.WorkResponse_Drain:
		s.drain(kind.Drain.GetReason())
	}
}

func (s *WorkSession) accept(lease *rolloutv1.Lease) {
	// What is not confirmed when the stream breaks is given back by the server.
	receipt := &dataflowv1.Receipt{LeaseIds: []string{lease.GetLeaseId()}}
	s.send(&dataflowv1.WorkRequest{Kind: &dataflowv1.WorkRequest_Receipt{Receipt: receipt}})
	s.lock.Lock()
	defer s.lock.Unlock()
	s.received++
	if s.held[lease.GetLeaseId()] != nil {
		return
	}
	if s.drainReason != "" {
		s.report(lease, &TaskFailed{Reason: "drain", Detail: "leased to a node that drains", Retryable: true})
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	held := &heldLease{lease: lease, cancel: cancel, done: make(chan struct{})}
	s.held[lease.GetLeaseId()] = held
	s.tasks.Add(1)
	go s.runLease(ctx, held)
}

func (s *WorkSession) runLease(ctx context.Context, held *heldLease) {
	defer s.tasks.Done()
	defer held.cancel()
	err := s.runGuarded(ctx, held.lease)
	s.lock.Lock()
	delete(s.held, held.lease.GetLeaseId())
	if err != nil && !held.isGone {
		failure := &TaskFailed{Reason: "workflow_error", Detail: err.Error(), Retryable: true}
		errors.As(err, &failure)
		s.report(held.lease, failure)
	}
	close(held.done)
	s.lock.Unlock()
	s.sendCredits()
}

// runGuarded turns a panic of the node's own code into a failure of the lease.
func (s *WorkSession) runGuarded(ctx context.Context, lease *rolloutv1.Lease) (err error) {
	defer func() {
		if panicked := recover(); panicked != nil {
			err = fmt.Errorf("panic: %v", panicked)
		}
	}()
	return s.work.Run(ctx, lease)
}

// drain takes no more, finishes what is held within the drain's time, gives the rest back, and ends the session.
func (s *WorkSession) drain(reason string) {
	s.lock.Lock()
	defer s.lock.Unlock()
	if s.drainReason != "" {
		return
	}
	if reason == "" {
		reason = "drain"
	}
	s.drainReason = reason
	var held []*heldLease
	for _, each := range s.held {
		held = append(held, each)
	}
	go func() {
		defer s.ended()
		s.sendCredits()
		deadline := time.NewTimer(s.work.Drain)
		defer deadline.Stop()
		for _, each := range held {
			select {
			case <-each.done:
				continue
			case <-deadline.C:
				deadline.Reset(0)
			}
			s.giveBack(each)
		}
	}()
}

func (s *WorkSession) giveBack(held *heldLease) {
	s.lock.Lock()
	defer s.lock.Unlock()
	if !held.isGone && s.held[held.lease.GetLeaseId()] == held {
		held.isGone = true
		held.cancel()
		detail := fmt.Sprintf("not finished within the drain's %s", s.work.Drain)
		s.report(held.lease, &TaskFailed{Reason: "drain", Detail: detail, Retryable: true})
	}
}

// report gives a lease back. One whose report fails runs out by itself: another node only gets the task later.
func (s *WorkSession) report(lease *rolloutv1.Lease, failed *TaskFailed) {
	detail := failed.Detail
	if len(detail) > maxDetail {
		detail = detail[:maxDetail]
	}
	failure := &dataflowv1.LeaseFailure{
		LeaseId: lease.GetLeaseId(), Reason: failed.Reason, Detail: detail, Retryable: failed.Retryable,
	}
	request := &dataflowv1.FailTaskRequest{RunId: lease.GetRunId(), NodeId: s.me.GetNodeId(), Failure: failure}
	s.tasks.Add(1)
	go func() {
		defer s.tasks.Done()
		ctx, cancel := context.WithTimeout(context.Background(), reportPatience)
		defer cancel()
		_, _ = s.client.Tasks.FailTask(ctx, request)
	}()
}

func (s *WorkSession) renewal() *dataflowv1.Renewal {
	renewal := &dataflowv1.Renewal{}
	for id := range s.held {
		renewal.LeaseIds = append(renewal.LeaseIds, id)
	}
	return renewal
}

func (s *WorkSession) sendCredits() { s.send(s.credits()) }

func (s *WorkSession) credits() *dataflowv1.WorkRequest {
	credits := &dataflowv1.Credits{}
	if s.work.State != nil {
		credits = s.work.State()
	}
	s.lock.Lock()
	defer s.lock.Unlock()
	received := s.received
	credits.LeasesReceived, credits.Tasks = &received, 0
	if s.drainReason != "" {
		credits.WaitingFor = "drain"
	}
	if free := int(s.me.GetMaxConcurrentTasks()) - len(s.held); credits.WaitingFor == "" && free > 0 {
		credits.Tasks = uint32(free)
	}
	return &dataflowv1.WorkRequest{Kind: &dataflowv1.WorkRequest_Credits{Credits: credits}}
}

// send writes on the open stream; without one the next stream says anew what matters.
func (s *WorkSession) send(request *dataflowv1.WorkRequest) {
	s.lock.Lock()
	requests, closed := s.requests, s.closed
	s.lock.Unlock()
	if requests == nil {
		return
	}
	select {
	case requests <- request:
	case <-closed:
	}
}
