package astraflow

import (
	"context"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	dataflowv1 "github.com/astraflow/astraflow/clients/go/astraflow/dataflow/v1"
	rolloutv1 "github.com/astraflow/astraflow/clients/go/astraflow/rollout/v1"
)

// maxPack is how many episodes one push carries at most, by the contract.
const maxPack = 64

// PushLimits bounds a push stream; the window's are the contract's.
type PushLimits struct {
	// Episodes and Bytes are what is kept, acknowledged episodes included that the server's disk may not have yet.
	Episodes, Bytes             int
	WindowEpisodes, WindowBytes int
	// Retain is how long an acknowledged episode is kept when the server cannot tell what is durable.
	Retain time.Duration
}

// DefaultPushLimits are those of the contract.
var DefaultPushLimits = PushLimits{
	Episodes: 4_096, Bytes: 1 << 28, WindowEpisodes: 128, WindowBytes: 1 << 24, Retain: 3 * time.Second,
}

// Pushed is an episode that a push stream took. Done is closed when Result and Err are set.
type Pushed struct {
	Done   chan struct{}
	Result *dataflowv1.PushResult
	Err    error

	episode  *rolloutv1.Episode
	size     int
	sequence uint64 // of the push of the stream of now that it went with
	position uint64
	ackedAt  time.Time
}

// Wait returns what became of the episode: an outcome, never an error, for one that the server does not want.
func (pushed *Pushed) Wait(ctx context.Context) (*dataflowv1.PushResult, error) {
	select {
	case <-pushed.Done:
		return pushed.Result, pushed.Err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// PushStream pushes finished episodes of one run until the server has answered for each.
//
// An episode that it took is sent again on every new stream until it is acknowledged (the server recognises
// repetitions); at most the contract's window is unacknowledged; memory is bounded. What is acknowledged in memory only
// is kept until the server's watermark passes it, and pushed again when the server comes back with another data set.
type PushStream struct {
	client *Client
	limits PushLimits
	ctx    context.Context
	cancel context.CancelFunc
	runs   sync.WaitGroup

	lock             sync.Mutex
	changed          chan struct{} // closed at each change, and replaced
	unsent, inFlight []*Pushed
	acked            []*Pushed
	dataIncarnation  string
	durablePosition  uint64
	knowsDurable     bool
	isRunning        bool
}

// NewPushStream returns a stream; it connects with the first episode. Close it when the last one is pushed.
func NewPushStream(client *Client, limits PushLimits) *PushStream {
	ctx, cancel := context.WithCancel(context.Background())
	return &PushStream{client: client, limits: limits, ctx: ctx, cancel: cancel, changed: make(chan struct{})}
}

// Push takes the episode in the order of the calls and returns at once; it waits while the stream holds all it may.
func (p *PushStream) Push(ctx context.Context, episode *rolloutv1.Episode) (*Pushed, error) {
	pushed := &Pushed{Done: make(chan struct{}), episode: episode, size: proto.Size(episode)}
	p.lock.Lock()
	defer p.lock.Unlock()
	for p.ctx.Err() == nil && !p.hasRoom(pushed.size) {
		if !p.await(ctx) {
			return nil, ctx.Err()
		}
	}
	if p.ctx.Err() != nil {
		return nil, newError(InvalidArgument, "the push stream is closed; open another one")
	}
	p.unsent = append(p.unsent, pushed)
	p.start()
	return pushed, nil
}

// Close waits until everything is acknowledged, or ctx ends, and ends the stream. It returns an error when something is
// left, which must be pushed again.
func (p *PushStream) Close(ctx context.Context) error {
	p.lock.Lock()
	for len(p.unsent)+len(p.inFlight) > 0 && p.await(ctx) {
	}
	p.lock.Unlock()
	p.cancel()
	p.runs.Wait()
	p.lock.Lock()
	defer p.lock.Unlock()
	if left := len(p.unsent) + len(p.inFlight); left > 0 {
		err := newError(Unavailable, "the push stream was closed before the server answered for %d episodes; push them again", left)
		p.end(err)
		return err
	}
	return nil
}

// Durable says that the server's disk has every commit up to the watermark. A working session that knows the stream
// calls it.
func (p *PushStream) Durable(watermark *dataflowv1.Watermark) {
	p.lock.Lock()
	defer p.lock.Unlock()
	p.durable(watermark)
}

// DataSet says which data set the server works on: with another one than before, what was not durable is pushed again.
func (p *PushStream) DataSet(incarnation string) {
	p.lock.Lock()
	defer p.lock.Unlock()
	p.dataSet(incarnation)
}

func (p *PushStream) durable(watermark *dataflowv1.Watermark) {
	p.dataSet(watermark.GetDataIncarnation())
	p.durablePosition, p.knowsDurable = watermark.GetDurablePosition(), true
	p.forgetSafe()
}

func (p *PushStream) dataSet(incarnation string) {
	before := p.dataIncarnation
	p.dataIncarnation = incarnation
	if before == "" || before == incarnation {
		return
	}
	p.knowsDurable = false // positions of the lost data set mean nothing in the new one
	for _, pushed := range p.acked {
		pushed.position = 0
	}
	p.unsent, p.acked = append(p.acked, p.unsent...), nil
	if len(p.unsent) > 0 {
		p.start()
	}
}

// start runs the stream unless it runs; what it waits for has changed.
func (p *PushStream) start() {
	if !p.isRunning && p.ctx.Err() == nil {
		p.isRunning = true
		p.runs.Add(1)
		go p.run()
	}
	p.notify()
}

func (p *PushStream) run() {
	defer p.runs.Done()
	for failures := 0; p.ctx.Err() == nil; {
		answered, err := p.converse()
		if answered {
			failures = 0
		}
		var hint time.Duration
		if err != nil && p.ctx.Err() == nil {
			refused := asError(err)
			if !mayComeBack(refused) {
				p.refuse(refused)
				return
			}
			failures, hint = failures+1, refused.RetryAfter
		}
		pause(p.ctx, reconnect.wait(failures, hint))
	}
}

// converse is one stream: write what fits the window, read acknowledgements.
func (p *PushStream) converse() (answered bool, err error) {
	ctx, cancel := context.WithCancel(p.ctx)
	opened, err := p.client.Trajectories.Push(ctx)
	if err != nil {
		cancel()
		return false, err
	}
	writes := make(chan struct{})
	go func() {
		defer close(writes)
		p.write(ctx, opened)
	}()
	for err == nil {
		var response *dataflowv1.PushResponse
		if response, err = opened.Recv(); err == nil {
			err = p.acknowledge(response)
			answered = answered || err == nil
		}
	}
	cancel()
	<-writes
	p.lock.Lock()
	// On the next stream in the old order: the server recognises what it has.
	p.unsent, p.inFlight = append(p.inFlight, p.unsent...), nil
	p.lock.Unlock()
	return answered, err
}

func (p *PushStream) write(ctx context.Context, opened dataflowv1.TrajectoryService_PushClient) {
	for sequence := uint64(1); ; sequence++ {
		p.lock.Lock()
		next := p.nextToSend(sequence)
		for next == nil && p.await(ctx) {
			next = p.nextToSend(sequence)
		}
		p.lock.Unlock()
		if next == nil {
			return
		}
		request := &dataflowv1.PushRequest{Sequence: sequence}
		for _, pushed := range next {
			request.Episodes = append(request.Episodes, pushed.episode)
		}
		if opened.Send(request) != nil {
			return // the reader learns why
		}
	}
}

// nextToSend takes what waits and fits the window: it goes together, and costs the server one commit.
func (p *PushStream) nextToSend(sequence uint64) (next []*Pushed) {
	inFlight := sizeOf(p.inFlight)
	for len(p.unsent) > 0 && len(next) < maxPack {
		pushed := p.unsent[0]
		isFull := len(p.inFlight) >= p.limits.WindowEpisodes || inFlight+pushed.size > p.limits.WindowBytes
		if len(p.inFlight) > 0 && isFull {
			break
		}
		pushed.sequence = sequence
		p.unsent, p.inFlight, next = p.unsent[1:], append(p.inFlight, pushed), append(next, pushed)
		inFlight += pushed.size
	}
	return next
}

func (p *PushStream) acknowledge(response *dataflowv1.PushResponse) error {
	p.lock.Lock()
	defer p.lock.Unlock()
	results, expected := response.GetResults(), 0
	for expected < len(p.inFlight) && p.inFlight[expected].sequence <= response.GetSequence() {
		expected++
	}
	if expected == 0 || p.inFlight[expected-1].sequence != response.GetSequence() || len(results) != expected {
		return newError(Internal, "the server acknowledged %d episodes up to push %d, expected %d", len(results), response.GetSequence(), expected)
	}
	defer p.notify()
	for _, result := range results {
		if result.GetOutcome() == dataflowv1.Outcome_OUTCOME_RETRY {
			return newError(Unavailable, "%s: %s", result.GetReason(), result.GetDetail())
		}
		p.answered(result)
	}
	if response.GetWatermark() != nil {
		p.durable(response.GetWatermark())
	}
	return nil
}

func (p *PushStream) answered(result *dataflowv1.PushResult) {
	pushed := p.inFlight[0]
	p.inFlight = p.inFlight[1:]
	if pushed.Result == nil { // else it is pushed again after a loss of data, and its caller has an answer
		pushed.Result = result
		close(pushed.Done)
	}
	isKept := result.GetOutcome() != dataflowv1.Outcome_OUTCOME_REFUSED
	if isKept && result.GetDurability() < dataflowv1.Durability_DURABILITY_FSYNCED {
		pushed.position, pushed.ackedAt = result.GetPosition(), time.Now()
		p.acked = append(p.acked, pushed)
	}
}

// refuse ends the stream: everybody who waits gets the reason, the next push opens another one.
func (p *PushStream) refuse(err *Error) {
	p.lock.Lock()
	defer p.lock.Unlock()
	p.isRunning = false
	p.end(err)
}

func (p *PushStream) end(err error) {
	for _, pushed := range append(p.inFlight, p.unsent...) {
		if pushed.Result == nil {
			pushed.Err = err
			close(pushed.Done)
		}
	}
	p.inFlight, p.unsent = nil, nil
	p.notify()
}

func (p *PushStream) forgetSafe() {
	before := time.Now().Add(-p.limits.Retain)
	for len(p.acked) > 0 {
		oldest := p.acked[0]
		isSafe := oldest.ackedAt.Before(before)
		if p.knowsDurable && oldest.position > 0 {
			isSafe = oldest.position <= p.durablePosition
		}
		if !isSafe {
			return
		}
		p.acked = p.acked[1:]
	}
}

func (p *PushStream) hasRoom(size int) bool {
	p.forgetSafe()
	count := len(p.unsent) + len(p.inFlight) + len(p.acked)
	bytes := sizeOf(p.unsent) + sizeOf(p.inFlight) + sizeOf(p.acked)
	return count == 0 || (count < p.limits.Episodes && bytes+size <= p.limits.Bytes)
}

// await releases the lock until something changes, a quarter of a second at most, for what becomes safe by time alone.
// It returns false when ctx has ended.
func (p *PushStream) await(ctx context.Context) bool {
	changed := p.changed
	p.lock.Unlock()
	defer p.lock.Lock()
	timer := time.NewTimer(250 * time.Millisecond)
	defer timer.Stop()
	select {
	case <-changed:
	case <-timer.C:
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}

func (p *PushStream) notify() {
	close(p.changed)
	p.changed = make(chan struct{})
}

func sizeOf(kept []*Pushed) int {
	sum := 0
	for _, pushed := range kept {
		sum += pushed.size
	}
	return sum
}
