package astraflow

import (
	"strings"
	"sync"

	dataflowv1 "github.com/astraflow/astraflow/clients/go/astraflow/dataflow/v1"
	optionsv1 "github.com/astraflow/astraflow/clients/go/astraflow/options/v1"
)

// sessions are the credentials that a client was given last: a node's by JoinRun, a trainer's by ClaimPolicy. Each is
// sent with every call in which that node or trainer speaks.
type sessions struct {
	lock  sync.Mutex
	known map[string]string
}

// WithSession presents a credential that JoinRun returned before a restart of the process, so that the node is still
// itself: it takes its name and its leases up again. A secret; keep it in a file that nobody else can read.
func WithSession(credential string) Option {
	return func(s *settings) error { s.session = credential; return nil }
}

// add takes a credential, af1/SPEAKER/…, for what its speaker does from now on.
func (s *sessions) add(credential string) {
	parts := strings.SplitN(credential, "/", 3)
	if len(parts) != 3 {
		return
	}
	s.lock.Lock()
	defer s.lock.Unlock()
	if s.known == nil {
		s.known = map[string]string{}
	}
	s.known[parts[1]] = credential
}

// of returns the credential to send with an rpc, empty for one in which nobody speaks, or nobody yet.
func (s *sessions) of(path string) string {
	declared, _ := option(path, optionsv1.E_Speaker).(optionsv1.Speaker)
	s.lock.Lock()
	defer s.lock.Unlock()
	switch declared {
	case optionsv1.Speaker_SPEAKER_NODE, optionsv1.Speaker_SPEAKER_OPENS_NODE:
		return s.known["node"]
	case optionsv1.Speaker_SPEAKER_UNSPECIFIED:
		return ""
	}
	return s.known["trainer"]
}

// opened keeps the credential of an answer that has one.
func (s *sessions) opened(reply interface{}) {
	switch answer := reply.(type) {
	case *dataflowv1.JoinRunResponse:
		s.add(answer.GetSession())
	case *dataflowv1.ClaimPolicyResponse:
		s.add(answer.GetSession())
	}
}
