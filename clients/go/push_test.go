package astraflow

import (
	"context"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	dataflowv1 "github.com/astraflow/astraflow/clients/go/astraflow/dataflow/v1"
	rolloutv1 "github.com/astraflow/astraflow/clients/go/astraflow/rollout/v1"
)

// pushServer goes away on its first stream once it may, and cannot take "c" in on the second one.
type pushServer struct {
	dataflowv1.UnimplementedTrajectoryServiceServer
	mayGoAway chan struct{}
	packs     []string // after the first stream
	streams   int
}

func (s *pushServer) Push(stream dataflowv1.TrajectoryService_PushServer) error {
	s.streams++
	if s.streams == 1 {
		<-s.mayGoAway
		return status.Error(codes.Unavailable, "away")
	}
	for {
		request, err := stream.Recv()
		if err != nil {
			return nil
		}
		response := &dataflowv1.PushResponse{Sequence: request.Sequence}
		var ids []string
		for _, episode := range request.Episodes {
			ids = append(ids, episode.EpisodeId)
			outcome := dataflowv1.Outcome_OUTCOME_ACCEPTED
			if s.streams == 2 && episode.EpisodeId == "c" {
				outcome = dataflowv1.Outcome_OUTCOME_RETRY
			}
			response.Results = append(response.Results, &dataflowv1.PushResult{Outcome: outcome})
		}
		s.packs = append(s.packs, strings.Join(ids, ""))
		if err := stream.Send(response); err != nil {
			return err
		}
	}
}

// servedBy returns a client of the server, for as long as the test takes.
func servedBy(t *testing.T, running dataflowv1.TrajectoryServiceServer) *Client {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	failOn(t, err)
	serving := grpc.NewServer()
	dataflowv1.RegisterTrajectoryServiceServer(serving, running)
	go func() { _ = serving.Serve(listener) }()
	t.Cleanup(serving.Stop)
	client, err := Connect(listener.Addr().String())
	failOn(t, err)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func TestWhatWaitsIsPushedTogetherAndWhatCouldNotBeTakenInComesAgain(t *testing.T) {
	running := &pushServer{mayGoAway: make(chan struct{})}
	client := servedBy(t, running)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	stream := NewPushStream(client, DefaultPushLimits)
	var pushed []*Pushed
	for _, id := range []string{"a", "b", "c", "d", "e"} {
		each, err := stream.Push(ctx, &rolloutv1.Episode{EpisodeId: id})
		failOn(t, err)
		pushed = append(pushed, each)
	}
	close(running.mayGoAway)
	for _, each := range pushed {
		result, err := each.Wait(ctx)
		failOn(t, err)
		if result.Outcome != dataflowv1.Outcome_OUTCOME_ACCEPTED {
			t.Fatalf("%s: %s", each.episode.EpisodeId, result.Outcome)
		}
	}
	failOn(t, stream.Close(ctx))
	if packs := fmt.Sprint(running.packs); packs != "[abcde cde]" {
		t.Fatalf("the server saw %s", packs)
	}
}

// twoAtOnceServer acknowledges two pushes in one response: on its first stream with an answer too few, on its second with
// a push that nobody sent.
type twoAtOnceServer struct {
	dataflowv1.UnimplementedTrajectoryServiceServer
	received chan string
	streams  int
}

func (s *twoAtOnceServer) Push(stream dataflowv1.TrajectoryService_PushServer) error {
	s.streams++
	response := &dataflowv1.PushResponse{}
	for len(response.Results) < 2 {
		request, err := stream.Recv()
		if err != nil {
			return err
		}
		response.Sequence = request.Sequence
		for _, episode := range request.Episodes {
			outcome := dataflowv1.Outcome_OUTCOME_ACCEPTED
			response.Results = append(response.Results, &dataflowv1.PushResult{Outcome: outcome})
			s.received <- episode.EpisodeId
		}
	}
	switch s.streams {
	case 1:
		response.Results = response.Results[:1]
	case 2:
		response.Sequence++
	}
	if err := stream.Send(response); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func TestOneResponseMayAcknowledgeSeveralPushesAndOneThatIsNotToWhatWasSentNone(t *testing.T) {
	running := &twoAtOnceServer{received: make(chan string, 8)}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	stream := NewPushStream(servedBy(t, running), DefaultPushLimits)
	for _, id := range []string{"a", "b"} {
		_, err := stream.Push(ctx, &rolloutv1.Episode{EpisodeId: id})
		failOn(t, err)
		if received := <-running.received; received != id {
			t.Fatalf("the server received %s", received)
		}
	}
	failOn(t, stream.Close(ctx))
	for number := 2; number <= 3; number++ {
		if again := <-running.received + <-running.received; again != "ab" {
			t.Fatalf("the server received %s again on stream %d", again, number)
		}
	}
}
