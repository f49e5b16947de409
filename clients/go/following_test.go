package astraflow

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"testing"
	"time"

	dataflowv1 "github.com/astraflow/astraflow/clients/go/astraflow/dataflow/v1"
)

const anywhere = "127.0.0.1:0"

// state is what a server shows and asks for, and what the files of its callers say.
type state struct {
	shown     proof
	clients   *proof // authority of clients, where the server asks for their certificates
	moves     bool   // to another address
	joins     map[string]interface{}
	authority *proof
	token     string // that the server then sees
}

func (s state) write(t *testing.T, folder, address string) {
	t.Helper()
	write := func(name string, content []byte) {
		failOn(t, os.WriteFile(filepath.Join(folder, name), content, 0o600))
	}
	if s.authority != nil {
		write("ca", certificateOf(*s.authority))
	}
	if s.clients != nil {
		key, err := x509.MarshalECPrivateKey(s.clients.key)
		failOn(t, err)
		write("crt", certificateOf(*s.clients))
		write("key", pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: key}))
	}
	fields := map[string]interface{}{"address": address, "ca": [][]byte{s.shown.certificate}}
	for name, value := range s.joins {
		fields[name] = value
	}
	write("join", []byte(joinString(t, fields)))
}

func certificateOf(p proof) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: p.certificate})
}

func listRuns(client *Client) error {
	_, err := client.Runs.ListRuns(context.Background(), &dataflowv1.ListRunsRequest{}, Timeout(20*time.Second))
	return err
}

func TestWhatChangesInTheFilesIsInForceWithTheNextCall(t *testing.T) {
	one, two := newProof(t, "localhost"), newProof(t, "localhost")
	other := newProof(t, "other.example")
	named := func(name string) map[string]interface{} { return map[string]interface{}{"server_name": name} }
	with := func(name, value string) map[string]interface{} {
		return map[string]interface{}{"server_name": "localhost", name: value}
	}
	for name, change := range map[string][2]state{
		"address of the join string":     {{shown: one, joins: named("localhost")}, {shown: one, joins: named("localhost"), moves: true}},
		"authority of the join string":   {{shown: one, joins: named("localhost")}, {shown: two, joins: named("localhost")}},
		"server name of the join string": {{shown: one, joins: named("localhost")}, {shown: other, joins: named("other.example")}},
		"token of the join string":       {{shown: one, joins: with("token", "t"), token: "Bearer t"}, {shown: one, joins: with("token", "u"), token: "Bearer u"}},
		"CA file":                        {{shown: one, authority: &one, joins: named("localhost")}, {shown: two, authority: &two, joins: named("localhost")}},
		"client certificate":             {{shown: one, clients: &one, joins: named("localhost")}, {shown: one, clients: &two, joins: named("localhost")}},
	} {
		change := change
		t.Run(name, func(t *testing.T) {
			folder, address := t.TempDir(), anywhere
			var client *Client
			var stop func()
			for i, state := range change {
				if stop != nil {
					stop()
				}
				if state.moves {
					address = anywhere
				}
				var running *server
				address, running, stop = serve(t, address, state.shown, state.clients)
				state.write(t, folder, address)
				if i == 0 {
					client = dialled(t, folder, state)
					defer client.Close()
				}
				failOn(t, listRuns(client))
				if seen := running.tokens[len(running.tokens)-1]; seen != state.token {
					t.Fatalf("the server saw %q", seen)
				}
			}
		})
	}
}

// dialled returns a client by the files of a state.
func dialled(t *testing.T, folder string, first state) *Client {
	t.Helper()
	options := []Option{WithJoinFile(filepath.Join(folder, "join"))}
	if first.authority != nil {
		options = append(options, WithCAFile(filepath.Join(folder, "ca")))
	}
	if first.clients != nil {
		options = append(options, WithClientCertificate(filepath.Join(folder, "crt"), filepath.Join(folder, "key")))
	}
	client, err := Connect("", options...)
	failOn(t, err)
	return client
}

func TestAFileThatIsNotUsableLeavesInForceWhatWasBefore(t *testing.T) {
	one := newProof(t, "localhost")
	first := state{shown: one, joins: map[string]interface{}{"server_name": "localhost"}}
	folder := t.TempDir()
	address, _, _ := serve(t, anywhere, one, nil)
	first.write(t, folder, address)
	client := dialled(t, folder, first)
	defer client.Close()
	for _, torn := range []string{"af1.abc", ""} {
		failOn(t, os.WriteFile(filepath.Join(folder, "join"), []byte(torn), 0o600))
		failOn(t, listRuns(client))
	}
	failOn(t, os.Remove(filepath.Join(folder, "join")))
	failOn(t, listRuns(client))
}

func TestAServerIsAwaitedWhoseCertificateIsReplacedBeforeTheFilesAre(t *testing.T) {
	one, two := newProof(t, "localhost"), newProof(t, "localhost")
	before := state{shown: one, joins: map[string]interface{}{"server_name": "localhost"}}
	after := state{shown: two, joins: before.joins}
	folder := t.TempDir()
	address, _, stop := serve(t, anywhere, one, nil)
	before.write(t, folder, address)
	client := dialled(t, folder, before)
	defer client.Close()
	failOn(t, listRuns(client))
	stop()
	serve(t, address, two, nil)
	ended := make(chan error, 1)
	go func() { ended <- listRuns(client) }()
	select {
	case err := <-ended:
		t.Fatalf("the call ended: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	after.write(t, folder, address)
	failOn(t, <-ended)
}
