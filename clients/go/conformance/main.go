// Command conformance runs the conformance suite's operations with this client: one JSON object per line in, one per
// line out. The operations are in docs/clients.md; what is right is decided by whoever sends them.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	astraflow "github.com/astraflow/astraflow/clients/go"
	dataflowv1 "github.com/astraflow/astraflow/clients/go/astraflow/dataflow/v1"
	rolloutv1 "github.com/astraflow/astraflow/clients/go/astraflow/rollout/v1"
)

type object = map[string]interface{}

// operation is one line; which fields matter depends on Op.
type operation struct {
	ID                                   json.RawMessage `json:"id"`
	Op, Client, Stream, Session, Address string
	Token, RPC                           string
	As                                   *string
	RetryTotalS                          *float64 `json:"retry_total_s"`
	Request, Message                     json.RawMessage
	TimeoutS                             float64 `json:"timeout_s"`
	CorrelationID                        string  `json:"correlation_id"`
	TrajectoryID                         string  `json:"trajectory_id"`
	TokenIDs                             []int32 `json:"token_ids"`
	LossMask                             []bool  `json:"loss_mask"`
	Logprobs                             []float32
	VersionSpans                         [][3]uint64 `json:"version_spans"`
	Episodes                             []json.RawMessage
	RunID                                string            `json:"run_id"`
	NodeID                               string            `json:"node_id"`
	MaxConcurrentTasks                   uint32            `json:"max_concurrent_tasks"`
	ServingVersions                      map[string]uint64 `json:"serving_versions"`
	LeaseID                              string            `json:"lease_id"`
	Reason, Detail                       string
	Retryable                            *bool
}

type openStream struct {
	stream grpc.ClientStream
	reply  protoreflect.MessageType
	cancel context.CancelFunc
}

type openSession struct {
	events chan object
	lock   sync.Mutex
	leases map[string]chan error
	stop   context.CancelFunc
	served chan struct{}
}

type driver struct {
	lock     sync.Mutex
	clients  map[string]*astraflow.Client
	streams  map[string]*openStream
	pushes   map[string]*astraflow.PushStream
	sessions map[string]*openSession
}

var unsupported = errors.New("unsupported")

func main() {
	d := &driver{}
	d.forget()
	var writing sync.Mutex
	lines := bufio.NewReader(os.Stdin)
	for {
		line, err := lines.ReadBytes('\n')
		if err == io.EOF {
			return
		}
		var op operation
		if err := json.Unmarshal(line, &op); err != nil {
			panic(err)
		}
		go func() {
			reply, _ := json.Marshal(d.reply(&op))
			writing.Lock()
			defer writing.Unlock()
			os.Stdout.Write(append(reply, '\n'))
		}()
	}
}

func (d *driver) reply(op *operation) object {
	answer, err := d.do(op)
	var refused *astraflow.Error
	switch {
	case err == nil && answer == nil:
		return object{"id": op.ID, "answer": object{}}
	case err == nil:
		return object{"id": op.ID, "answer": answer}
	case err == unsupported:
		return object{"id": op.ID, "unsupported": op.Op}
	case errors.As(err, &refused):
		return object{"id": op.ID, "error": described(refused)}
	}
	return object{"id": op.ID, "crashed": err.Error()}
}

func described(err *astraflow.Error) object {
	found := object{
		"reason": err.Reason, "code": codeOf(err), "branch": err.Kind(), "message": err.Message,
		"metadata": err.Metadata, "retry_after_s": nil,
	}
	if err.Metadata == nil {
		found["metadata"] = object{}
	}
	if err.RetryAfter > 0 {
		found["retry_after_s"] = err.RetryAfter.Seconds()
	}
	return found
}

// codeOf writes a code as the contract does: NotFound is NOT_FOUND.
func codeOf(err *astraflow.Error) string {
	var text strings.Builder
	for i, letter := range err.Code().String() {
		if i > 0 && letter < 'a' {
			text.WriteByte('_')
		}
		text.WriteRune(letter)
	}
	return strings.ToUpper(text.String())
}

func (d *driver) do(op *operation) (interface{}, error) {
	switch op.Op {
	case "connect":
		return nil, d.connect(op)
	case "server_info":
		info, err := d.client(op).ServerInfo(context.Background())
		return object{"contract_version": info.GetContractVersion(), "product_version": info.GetProductVersion()}, err
	case "call":
		return d.call(op)
	case "stream.open":
		return nil, d.open(op)
	case "stream.next":
		return d.next(op)
	case "stream.close":
		named(d, d.streams, op.Stream).cancel()
		return nil, nil
	case "encode_columns":
		return encode(op)
	case "decode_columns":
		return decode(op)
	case "push.open":
		opened := astraflow.NewPushStream(d.client(op), astraflow.DefaultPushLimits)
		store(d, d.pushes, op.Stream, opened)
		return nil, nil
	case "push":
		return push(named(d, d.pushes, op.Stream), op.Episodes)
	case "push.close":
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		return object{"all_answered": named(d, d.pushes, op.Stream).Close(ctx) == nil}, nil
	case "reset":
		d.reset()
		return nil, nil
	}
	return d.doSession(op)
}

func (d *driver) connect(op *operation) error {
	var options []astraflow.Option
	if op.Token != "" {
		options = append(options, astraflow.WithToken(op.Token))
	}
	if op.RetryTotalS != nil {
		policy := astraflow.DefaultRetry
		policy.Total = time.Duration(*op.RetryTotalS * float64(time.Second))
		options = append(options, astraflow.WithRetry(policy))
	}
	client, err := astraflow.Connect(op.Address, options...)
	if err == nil {
		store(d, d.clients, op.Client, client)
	}
	return err
}

func (d *driver) client(op *operation) *astraflow.Client {
	client := named(d, d.clients, op.Client)
	if op.As != nil {
		return client.As(*op.As)
	}
	return client
}

// rpc returns the path, the request and the type of the answer.
func rpc(op *operation) (string, proto.Message, protoreflect.MessageType) {
	service, name, _ := strings.Cut(op.RPC, "/")
	full := protoreflect.FullName("astraflow.dataflow.v1." + service + "." + name)
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(full)
	if err != nil {
		panic(err)
	}
	method := found.(protoreflect.MethodDescriptor)
	request, _ := protoregistry.GlobalTypes.FindMessageByName(method.Input().FullName())
	reply, _ := protoregistry.GlobalTypes.FindMessageByName(method.Output().FullName())
	asked := request.New().Interface()
	if len(op.Request) > 0 {
		must(protojson.Unmarshal(op.Request, asked))
	}
	return "/astraflow.dataflow.v1." + op.RPC, asked, reply
}

func (d *driver) call(op *operation) (interface{}, error) {
	path, request, replyType := rpc(op)
	ctx, options, reply := context.Background(), []grpc.CallOption{}, replyType.New().Interface()
	if op.TimeoutS > 0 {
		options = append(options, astraflow.Timeout(time.Duration(op.TimeoutS*float64(time.Second))))
	}
	if op.CorrelationID != "" {
		ctx = astraflow.Correlated(ctx, op.CorrelationID)
	}
	err := d.client(op).Channel.Invoke(ctx, path, request, reply, options...)
	return asJSON(reply), err
}

func (d *driver) open(op *operation) error {
	path, request, reply := rpc(op)
	ctx, cancel := context.WithCancel(context.Background())
	opened, err := d.client(op).Channel.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, path)
	if err == nil {
		err = opened.SendMsg(request)
	}
	if err == nil {
		err = opened.CloseSend()
	}
	store(d, d.streams, op.Stream, &openStream{opened, reply, cancel})
	return err
}

func (d *driver) next(op *operation) (interface{}, error) {
	opened := named(d, d.streams, op.Stream)
	message := opened.reply.New().Interface()
	err := opened.stream.RecvMsg(message)
	if err == io.EOF {
		return object{"ended": true}, nil
	}
	return asJSON(message), err
}

func encode(op *operation) (interface{}, error) {
	columns := astraflow.Columns{TokenIDs: op.TokenIDs, LossMask: op.LossMask, Logprobs: op.Logprobs}
	for _, span := range op.VersionSpans {
		columns.VersionSpans = append(columns.VersionSpans,
			&rolloutv1.VersionSpan{Start: uint32(span[0]), End: uint32(span[1]), Version: span[2]})
	}
	message, err := astraflow.EncodeColumns(columns, op.TrajectoryID)
	return asJSON(message), err
}

func decode(op *operation) (interface{}, error) {
	message := &rolloutv1.Trajectory{}
	must(protojson.Unmarshal(op.Message, message))
	columns, err := astraflow.DecodeColumns(message)
	spans, logprobs := [][3]uint64{}, []float64{} // as float32, JSON would lack digits
	for _, logprob := range columns.Logprobs {
		logprobs = append(logprobs, float64(logprob))
	}
	for _, span := range columns.VersionSpans {
		spans = append(spans, [3]uint64{uint64(span.GetStart()), uint64(span.GetEnd()), span.GetVersion()})
	}
	return object{
		"token_ids": columns.TokenIDs, "loss_mask": columns.LossMask, "logprobs": logprobs, "version_spans": spans,
	}, err
}

func push(stream *astraflow.PushStream, episodes []json.RawMessage) (interface{}, error) {
	ctx := context.Background()
	var pushed []*astraflow.Pushed
	for _, raw := range episodes {
		episode := &rolloutv1.Episode{}
		must(protojson.Unmarshal(raw, episode))
		each, err := stream.Push(ctx, episode)
		if err != nil {
			return nil, err
		}
		pushed = append(pushed, each)
	}
	var results []json.RawMessage
	for _, each := range pushed {
		result, err := each.Wait(ctx)
		if err != nil {
			return nil, err
		}
		results = append(results, asJSON(result))
	}
	return results, nil
}

func (d *driver) doSession(op *operation) (interface{}, error) {
	if op.Op == "session.open" {
		return nil, d.openSession(op)
	}
	if !strings.HasPrefix(op.Op, "session.") {
		return nil, unsupported
	}
	session := named(d, d.sessions, op.Session)
	session.lock.Lock()
	lease := session.leases[op.LeaseID]
	session.lock.Unlock()
	switch op.Op {
	case "session.next":
		return <-session.events, nil
	case "session.finish":
		lease <- nil
	case "session.fail":
		isRetryable := op.Retryable == nil || *op.Retryable
		lease <- &astraflow.TaskFailed{Reason: op.Reason, Detail: op.Detail, Retryable: isRetryable}
	case "session.close":
		session.stop()
		<-session.served
	default:
		return nil, unsupported
	}
	return nil, nil
}

func (d *driver) openSession(op *operation) error {
	me := &dataflowv1.JoinRunRequest{
		RunId: op.RunID, NodeId: op.NodeID, MaxConcurrentTasks: op.MaxConcurrentTasks,
	}
	joined, err := astraflow.JoinRun(context.Background(), d.client(op), me)
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(context.Background())
	session := &openSession{
		events: make(chan object, 1_000), leases: map[string]chan error{}, stop: stop, served: make(chan struct{}),
	}
	work := astraflow.Work{
		Run:   session.run,
		State: func() *dataflowv1.Credits { return &dataflowv1.Credits{ServingVersions: op.ServingVersions} },
		OnVersion: func(version *dataflowv1.Version) {
			seen := object{"policy_id": version.GetPolicyId(), "version": version.GetVersion()}
			session.events <- object{"version": seen}
		},
	}
	go func() {
		defer close(session.served)
		reason, err := joined.Serve(ctx, work)
		var refused *astraflow.Error
		if errors.As(err, &refused) {
			session.events <- object{"error": described(refused)}
		} else {
			session.events <- object{"ended": reason}
		}
	}()
	store(d, d.sessions, op.Session, session)
	return nil
}

func (s *openSession) run(ctx context.Context, lease *rolloutv1.Lease) error {
	ends := make(chan error, 1)
	s.lock.Lock()
	s.leases[lease.GetLeaseId()] = ends
	s.lock.Unlock()
	s.events <- object{"lease": asJSON(lease)}
	select {
	case err := <-ends:
		return err
	case <-ctx.Done():
		s.events <- object{"cancelled": lease.GetLeaseId()}
		return nil
	}
}

func (d *driver) reset() {
	for _, session := range d.sessions {
		session.stop()
		<-session.served
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	for _, opened := range d.pushes {
		_ = opened.Close(ended)
	}
	for _, opened := range d.streams {
		opened.cancel()
	}
	for _, client := range d.clients {
		_ = client.Close()
	}
	d.forget()
}

func (d *driver) forget() {
	d.clients, d.streams = map[string]*astraflow.Client{}, map[string]*openStream{}
	d.pushes, d.sessions = map[string]*astraflow.PushStream{}, map[string]*openSession{}
}

func nameOf(name string) string {
	if name == "" {
		return "main"
	}
	return name
}

func named[Value any](d *driver, found map[string]Value, name string) Value {
	d.lock.Lock()
	defer d.lock.Unlock()
	value, isOpen := found[nameOf(name)]
	if !isOpen {
		panic(fmt.Sprintf("nothing is open as %s", nameOf(name)))
	}
	return value
}

func store[Value any](d *driver, into map[string]Value, name string, value Value) {
	d.lock.Lock()
	defer d.lock.Unlock()
	into[nameOf(name)] = value
}

func asJSON(message proto.Message) json.RawMessage {
	text, err := protojson.Marshal(message)
	must(err)
	return text
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
